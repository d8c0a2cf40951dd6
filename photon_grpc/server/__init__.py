"""The layer that speaks messages: protobuf in and out over grpc.aio. It computes nothing."""
