"""Carries frames between our own processes. It handles sockets and bytes, not text, tensors or gRPC."""
