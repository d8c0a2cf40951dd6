"""Flags of the command line, and text on a terminal."""
