"""Carries frames between our own processes: knows sockets and bytes, and nothing of text, tensors or gRPC."""
