"""Times of tiles where they are used: in decode layers of the swept shapes.

One product after another is multiplied by each of the tiles that the cost model finds best, and by the library; the
other products as they are chosen.

    python -m benchmarks.kernels.chain_sweep --out FILE.jsonl [--rows 32]      # on a GPU

`fit.py` fits the model of cost to the result.

A product alone in a row of its like (`sweep.py`) has neighbours that it does not have in a layer: what the kernel
before leaves of a multiprocessor's shared memory, and when, is a part of what a tile costs.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.layer_chains import Steps, decoders, num_layers
from benchmarks.kernels.sweep import SWEPT, projections
from benchmarks.kernels.timing import needs_gpu
from benchmarks.shapes import SHAPES
from photon_grpc.kernels.lang.precompile import Job, launches_collected, run_in_forks
from photon_grpc.kernels.linear import cost
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.layers.epilogues import Epilogue
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.unquantized import Unquantized, product_of
from photon_grpc.models import Decoder
from photon_grpc.models.fused import fuse

ROWS = (8, 16, 32, 64)
#: Tiles of a product: so many of the best of every size, and so many in all.
OF_A_SIZE, IN_ALL = 3, 10


class Given(Unquantized):
    """One product by the tile that is given, None by the library; the others as they are chosen."""

    def __init__(self, product: Product, given: Tile | None) -> None:
        self._product, self._given = product, given

    def tile(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Tile | None:
        if num_rows and product_of(linear, num_rows, epilogue) == self._product:
            return self._given
        return super().tile(linear, num_rows, epilogue)


def candidates(product: Product) -> list[Tile | None]:
    """Return the best tile by the model, some of every size, and the library."""
    ranked = sorted(cost.candidates(product), key=lambda tile: cost.tile_us(tile, product))
    taken: list[Tile] = []
    for tile in ranked:
        size = tile.kind, tile.BN
        if sum((other.kind, other.BN) == size for other in taken) < OF_A_SIZE:
            taken.append(tile)
    return [*taken[:IN_ALL], None]


def given(unfused: Decoder, product: Product, tile: Tile | None) -> Decoder:
    for leaf in unfused.leaves():
        if isinstance(leaf, Linear):
            leaf.method = Given(product, tile)
    fused = fuse(unfused)
    assert fused is not None
    return fused


def products(name: str, all_rows: Sequence[int]) -> Iterator[Product]:
    for rows in all_rows:
        yield from dict.fromkeys(projection.product(rows) for projection in projections(SHAPES[name]))


def compile_all(all_rows: Sequence[int]) -> None:
    jobs: list[Job] = []
    for name in SWEPT:
        chosen, _, unfused = decoders(SHAPES[name], 1)
        steps = Steps(unfused, max(all_rows))
        with launches_collected() as found:
            for product in products(name, all_rows):
                for tile in candidates(product):
                    steps.run(given(unfused, product, tile), product.rows, steps.context(chosen, product.rows))
        jobs += found
    torch.cuda.synchronize()
    done = run_in_forks(jobs, num_workers=os.cpu_count() or 1)
    print(f"{done} of {len(jobs)} kernels compiled", flush=True)


def timed(name: str, all_rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Return microseconds a layer, for each candidate of each product."""
    _, _, unfused = decoders(SHAPES[name], num_layers(SHAPES[name]))
    steps = Steps(unfused, max(all_rows))
    for product in products(name, all_rows):
        found = [
            (round(steps.us(given(unfused, product, tile), product.rows), 2), tile) for tile in candidates(product)
        ]
        library = next(us for us, tile in found if tile is None)
        tiles = sorted((us, *tile) for us, tile in found if tile is not None)
        print(name, tuple(product), f"library {library}", *(tiles[:3]), flush=True)
        yield {"shape": name, "product": product, "library": library, "tiles": tiles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.chain_sweep")
    with torch.inference_mode():
        compile_all(arguments.rows)
        with arguments.out.open("w") as out:
            for name in SWEPT:
                for result in timed(name, arguments.rows):
                    out.write(json.dumps(result) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
