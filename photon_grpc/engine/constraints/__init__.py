"""Grammars and matchers: the ids that a constrained output may continue with."""
