"""Callers' own services, answered by the model: descriptors, prompts, methods."""
