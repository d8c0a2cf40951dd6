"""Whole networks: a decoder per family, and how its weights come into it."""

from photon_grpc.models.decoder import Decoder
from photon_grpc.models.registry import build
from photon_grpc.models.weights import dummy, load

__all__ = ["Decoder", "build", "dummy", "load"]
