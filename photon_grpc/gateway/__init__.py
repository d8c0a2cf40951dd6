"""Other ways in: a terminal in front of a gRPC server. Computes nothing and knows nothing of what is behind the wire."""
