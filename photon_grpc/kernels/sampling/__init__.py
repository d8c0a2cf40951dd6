"""From logits to ids: noise, filters, sampling."""
