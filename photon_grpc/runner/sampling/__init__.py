"""From logits to ids."""
