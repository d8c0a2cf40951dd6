"""Whole networks: a decoder, its builder, the loading of its weights."""

from photon_grpc.models.builder import build
from photon_grpc.models.decoder import Decoder
from photon_grpc.models.weights import dummy, load

__all__ = ["Decoder", "build", "dummy", "load"]
