"""Searches the tiles of a layer's four products together: how tiles meet in a layer is not the sum of their times.

    python -m benchmarks.kernels.layer_sweep --shape 8b --rows 1,8,16 --out sweep.jsonl

Coordinate descent over decode steps of several layers on a GPU: it starts from the tiles that the engine takes, tries
for one product after the other every tile of a wide menu, and keeps the fastest. Each candidate is timed beside the
best so far, in turns, so that a drift of the clocks hits both. Rounds end when none gains more than MIN_GAIN.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from itertools import product as combinations
from pathlib import Path

import torch

from benchmarks.kernels.layer_chains import KNOWN, Steps, decoders, num_layers
from benchmarks.kernels.sweep import projections
from benchmarks.kernels.timing import needs_gpu
from photon_grpc.kernels.lang.precompile import Job, launches_collected, run_in_forks
from photon_grpc.kernels.linear import cost, tiles
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.layers.epilogues import Epilogue
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.unquantized import Unquantized, product_of
from photon_grpc.models import Decoder
from photon_grpc.models.fused import fuse

#: A part of a layer's time.
MIN_GAIN = 0.002
#: Tiles of a product to time, the best by the model of cost.
OF_EACH = 24
BYTES_IN_FLIGHT = (48 << 10, 64 << 10, 96 << 10, 128 << 10, 160 << 10, 190 << 10)
#: The tiles of one layer.
Chosen = dict[Product, Tile | None]


class Given(Unquantized):
    """Products by the tiles that are given, None by the library."""

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen

    def tile(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Tile | None:
        if not num_rows:
            return None
        product = product_of(linear, num_rows, epilogue)
        return self._chosen[product] if product in self._chosen else super().tile(linear, num_rows, epilogue)


def given(unfused: Decoder, chosen: Chosen) -> Decoder:
    for leaf in unfused.leaves():
        if isinstance(leaf, Linear):
            leaf.method = Given(chosen)
    fused = fuse(unfused)
    assert fused is not None
    return fused


def products(name: str, rows: int) -> list[Product]:
    """Return a layer's products for the bucket of `rows` rows."""
    bucket = tiles.bucket(rows) or rows
    return list(dict.fromkeys(projection.product(bucket) for projection in projections(KNOWN[name])))


def menu(product: Product) -> list[Tile | None]:
    """Return the best of many tiles by the model of cost, and the library."""
    slices, rows = product.slices, product.rows
    found: list[Tile] = []
    for bn, bk, warps, in_flight in combinations((16, 32, 64), (64, 128, 256), (1, 2, 4), BYTES_IN_FLIGHT):
        found.append(Tile("gemv", bn, bk, warps * slices, min(16, in_flight // (2 * slices * bk * (bn + rows)))))
    for bn, bk, warps, steps in combinations((64, 128), (64, 128), (4, 8), range(4, 13)):
        found.append(Tile("wgmma", bn, bk, warps, steps))
    holds = cost.EPILOGUES[product.epilogue].holds
    fitting = [
        tile
        for tile in dict.fromkeys(found)
        if _runs(tile, rows) and tiles.fits(tile, product.problem(product.span if holds(tile, product.span) else 0))
    ]
    return [*sorted(fitting, key=lambda tile: cost.tile_us(tile, product))[:OF_EACH], None]


def _runs(tile: Tile, rows: int) -> bool:
    if tile.kind == "gemv":
        return rows <= 32 and tile.NS >= 2
    return rows >= 16 and tile.NS >= 3 and tile.KW * 16 <= tile.BN


def compile_all(name: str, all_rows: list[int]) -> None:
    """Compile every candidate, side by side."""
    chosen, _, unfused = decoders(KNOWN[name], 1)
    steps = Steps(unfused, max(all_rows))
    with launches_collected() as jobs:
        for rows in all_rows:
            for product in products(name, rows):
                for tile in menu(product):
                    steps.run(given(unfused, {product: tile}), rows, steps.context(chosen, rows))
    torch.cuda.synchronize()
    collected: list[Job] = list(jobs)
    done = run_in_forks(collected, num_workers=os.cpu_count() or 1)
    print(f"{done} of {len(collected)} kernels compiled", flush=True)


def descend(name: str, rows: int, rounds: int) -> Iterator[dict[str, object]]:
    """Yield every candidate that was kept, with microseconds a layer before and after."""
    _, _, unfused = decoders(KNOWN[name], num_layers(KNOWN[name]))
    steps = Steps(unfused, rows)
    best: Chosen = {product: cost.choose(product) for product in products(name, rows)}
    for _ in range(rounds):
        gained = False
        for product in products(name, rows):
            for tile in menu(product):
                trial = best | {product: tile}
                before, after = in_turns(steps, rows, given(unfused, best), given(unfused, trial))
                if after < before * (1 - MIN_GAIN):
                    best, gained = trial, True
                    print(f"{name} {rows}: {before:.2f} -> {after:.2f} {product.n}x{product.k} {tile}", flush=True)
                    yield {"shape": name, "rows": rows, "before": before, "after": after, "tiles": _plain(best)}
        if not gained:
            return


def in_turns(steps: Steps, rows: int, one: Decoder, other: Decoder) -> tuple[float, float]:
    """Return the least microseconds a layer of two decoders, timed in turns."""
    found = [(steps.us(one, rows), steps.us(other, rows)) for _ in range(2)]
    return min(us for us, _ in found), min(us for _, us in found)


def _plain(chosen: Chosen) -> list[object]:
    return [[*product, None if tile is None else [*tile]] for product, tile in chosen.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["8b"], choices=[*KNOWN])
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.layer_sweep")
    all_rows = [int(rows) for rows in arguments.rows.split(",")]
    with torch.inference_mode(), arguments.out.open("w") as out:
        for name in arguments.shape:
            compile_all(name, all_rows)
            for rows in all_rows:
                for kept in descend(name, rows, arguments.rounds):
                    out.write(json.dumps(kept) + "\n")
                    out.flush()


if __name__ == "__main__":
    main()
