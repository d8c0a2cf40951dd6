"""Parts of a network, with their weights. Inference only; no layer knows its model family."""
