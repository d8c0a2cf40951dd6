"""Gives time and memory in the next step."""
