"""Speaks messages: protobuf in, protobuf out, over grpc.aio. Computes nothing and knows neither tokens' texts nor
blocks nor tensors."""
