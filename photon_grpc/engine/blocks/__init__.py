"""Ownership of KV blocks."""
