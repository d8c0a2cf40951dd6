"""Flags, texts and pictures of a terminal."""
