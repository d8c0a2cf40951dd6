"""Grammars and matchers, which determine the ids that may follow in a constrained output."""
