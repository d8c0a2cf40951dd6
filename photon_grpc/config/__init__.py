"""Defaults, flags and what a model directory says. No torch."""
