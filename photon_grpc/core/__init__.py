"""The nouns: plain data that every package may use. No torch, no grpc, no I/O, no decisions."""
