"""Attention over the paged KV cache."""

from photon_grpc.layers.attention.attention import Attention, QKNorm

__all__ = ["Attention", "QKNorm"]
