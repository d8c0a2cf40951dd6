"""Attention over a paged KV cache, and the kernels that write its pages."""
