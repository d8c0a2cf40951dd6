"""Constraints on outputs: their grammars, bounds and trials."""
