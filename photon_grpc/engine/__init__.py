"""Speaks ids: who computes what next, and which blocks hold it. Knows neither text nor tensors nor the wire."""
