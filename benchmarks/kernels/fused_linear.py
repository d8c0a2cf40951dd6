"""The four products of a layer and the head that samples, per bucket of rows.

As they are chosen, beside the matrix library with the kernels that it needs, and the floor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from benchmarks.kernels.sweep import Chain, Projection, num_weights, projections
from benchmarks.kernels.timing import print_header
from benchmarks.shapes import SAMPLE, SHAPES
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.linear import cost, tiles

# A streaming read of the weights, the fastest that one H200 was seen to do.
READ_BYTES_PER_SECOND = 4.5e12


def measured() -> Iterator[tuple[str, Projection]]:
    for name in ("1b", "8b", *SAMPLE):
        yield from ((name, projection) for projection in projections(SHAPES[name]))
        yield name, Projection("head", SHAPES[name]["vocab_size"], SHAPES[name]["hidden_size"], 0, "head")


def table(kernels: Kernels, device: torch.device) -> None:
    """Print the table; nothing without a GPU."""
    if device.type != "cuda":
        return
    print_header("fused_linear", "µs", "library µs", "floor µs", "of the floor %", "tile")
    for (name, projection), rows in itertools.product(measured(), tiles.BUCKETS):
        tile = cost.choose(projection.product(rows))
        chain = Chain(projection, rows, num_weights(projection), device)
        library = chain.us(chain.library)
        us = library if tile is None else chain.us(lambda w, chain=chain, tile=tile: chain.launch(w, tile))
        floor = 2 * projection.n * projection.k / READ_BYTES_PER_SECOND * 1e6
        print(
            f"| {name} {projection.name} rows {rows} | {us:.2f} | {library:.2f} | {floor:.2f} "
            f"| {100 * floor / us:.1f} | {tuple(tile or ())} |",
            flush=True,
        )
