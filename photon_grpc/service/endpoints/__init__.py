"""Addresses and plain HTTP."""
