"""Speaks ids: chooses the rows of every step and the blocks that hold them. Knows neither text nor tensors nor the
wire."""
