"""Attention over a paged KV cache, and the writing of its pages."""
