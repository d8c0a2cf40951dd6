"""Check that a model directory's weights are those that its config.json asks for, from their headers alone."""

from __future__ import annotations

import sys

import torch

from photon_grpc.config.checkpoint import read_checkpoint
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.errors import PhotonError
from photon_grpc.kernels import select
from photon_grpc.models import builder, weights


def check_weights(directory: str) -> None:
    """Raise ModelLoadError naming the tensor that is missing, surplus, or of a wrong shape or dtype."""
    card = read_model_dir(directory)
    kernels = select("torch", "cpu")
    decoder = builder.build(card, dtype=torch.float32, device="cpu", kernels=kernels, max_model_len=2)
    weights.check(decoder, read_checkpoint(card.path), card)


def main() -> None:
    """Print the problem of the directory that is the program's argument; nothing where there is none."""
    try:
        check_weights(sys.argv[1])
    except PhotonError as error:
        print(error)


if __name__ == "__main__":
    main()
