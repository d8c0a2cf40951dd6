"""From logits to ids: noise, filters, draws."""
