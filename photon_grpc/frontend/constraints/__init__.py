"""Constraints on outputs, which are written as grammars, measured and tried."""
