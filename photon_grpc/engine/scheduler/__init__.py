"""Assigns time and memory in the next step."""
