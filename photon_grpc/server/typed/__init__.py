"""Callers' message types and their grammars."""
