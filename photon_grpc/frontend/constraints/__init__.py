"""Constraints on outputs: written as grammars, measured and tried."""
