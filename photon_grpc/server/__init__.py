"""The layer that speaks messages: protobuf in, protobuf out, over grpc.aio.

It computes nothing, and knows no token texts, blocks or tensors.
"""
