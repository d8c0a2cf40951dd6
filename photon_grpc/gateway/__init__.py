"""The layer that speaks HTTP: requests in, answers and token streams out. It computes nothing."""
