"""The nouns: plain data that every floor may hold. No torch, no grpc, no I/O, no decisions."""
