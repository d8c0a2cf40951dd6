"""Decoding of outputs: text, stop strings, parts of answers, log-probabilities."""
