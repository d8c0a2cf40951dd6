"""Who owns which KV block."""
