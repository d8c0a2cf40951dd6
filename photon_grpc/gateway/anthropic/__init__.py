"""The API of Anthropic."""
