"""Speaks tensors: a Batch of ints becomes one forward pass and drawn ids. Knows neither requests nor text."""
