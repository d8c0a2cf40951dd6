"""Weights of linear layers in 8 and in 4 bits: how checkpoints store them, and the products with them."""
