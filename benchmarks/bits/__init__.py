"""Whether a request gives the same bits in any batch and by any path."""
