"""Experts: which of them a token reaches, and the products of many experts at once."""
