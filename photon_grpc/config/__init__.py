"""Defaults, flags and the contents of a model directory, read without torch."""
