"""Metrics, spans and logs of requests."""
