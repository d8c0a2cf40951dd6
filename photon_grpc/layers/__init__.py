"""Parts of a network: what has weights, and what is computed with them. Inference only; no layer knows which family it serves."""
