"""Rotary position embedding, alone and with the page write after it."""
