"""Protobuf messages to and from plain data."""
