"""Plans the rows of every step and the blocks that hold them. It handles ids, not text, tensors or the wire."""
