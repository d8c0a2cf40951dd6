"""Conversion between protobuf messages and plain data."""
