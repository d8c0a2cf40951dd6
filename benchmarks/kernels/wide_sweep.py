"""Times every tile of `wide.py` on products of packed weights with 129 and more rows of x, beside 16 bits.

    CUBLAS_WORKSPACE_CONFIG=:0:0 python -m benchmarks.kernels.wide_sweep --kind int8-g128 int4-g128 --shape qwen3-14b

A line a product: microseconds, with the end and with what the product needs beside it, of every tile; of the one that
is chosen; of 16 bits, before and after the tiles. What a tile writes is compared bit for bit with what the library
writes for the dequantized weight.
"""

from __future__ import annotations

import os

# The library may not split K; it reads this once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.kernels.packed_sweep import KINDS, PackedChain
from benchmarks.kernels.sweep import CHAIN_BYTES, Chain, Projection, multiply, projections
from benchmarks.kernels.timing import measure_us, needs_gpu
from benchmarks.shapes import SHAPES
from photon_grpc.kernels.lang.jit import num_multiprocessors
from photon_grpc.kernels.linear import wide, wide_tiles
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.weight import QuantizedWeight
from photon_grpc.kernels.linear.wide_tiles import WideTile
from photon_grpc.layers.operands import DenseOperands, PackedOperands


def by(chain: Chain, tile: WideTile | None, w: QuantizedWeight) -> None:
    """Multiply by a tile, or by the library from the dequantized weight."""
    with patch.object(wide, "choose", lambda *_: tile), patch.object(wide, "compiled_once", lambda *_, **__: None):
        multiply(chain, chain.projection.epilogue, PackedOperands(w, None, chain.slices))


def what_is_wrong(projection: Projection, name: str, tile: WideTile) -> str:
    """Compile a tile's kernel, and return what is wrong with what it writes; "" for nothing."""
    with torch.inference_mode():
        for rows in (256, 168):
            chain = PackedChain(projection, rows, KINDS[name], torch.device("cuda"))
            written = []
            try:
                for one in (None, tile, tile, tile):
                    chain._clear()
                    by(chain, one, chain.packed[0])
                    written.append(chain._written())
            except Exception as failure:
                return f"FAILED {str(failure)[:200]}"
            for found in written[1:]:
                if not torch.equal(written[0], found):
                    return f"WRONG {rows} {(written[0] != found).float().mean():.4f}"
    return ""


def timed(projection: Projection, rows: int, name: str, right: list[WideTile], device: torch.device) -> None:
    n, k, kind = projection.n, projection.k, KINDS[name]
    chain = PackedChain(projection, rows, kind, device, max(2, CHAIN_BYTES * 8 // (n * k * kind.BITS)))
    plain = replace(projection, slices=0)
    dense = Chain(plain, rows, max(2, CHAIN_BYTES // (2 * n * k)), device)

    def of_16_bits() -> float:
        operands = [DenseOperands(w, None, plain.num_slices) for w in dense.weights]
        return measure_us([partial(multiply, dense, projection.epilogue, one) for one in operands], device, repeats=7)

    for w in chain.packed:
        by(chain, right[0], w)
    before = of_16_bits()
    found = []
    for tile in right:
        us = measure_us([partial(by, chain, tile, w) for w in chain.packed], device, repeats=7)
        found.append((round(us, 1), *tile))
    after = of_16_bits()
    chosen = wide_tiles.fastest(rows, n, k, projection.num_slices, kind.BITS)
    print(
        f"{name} {projection.name} {n}x{k}/{projection.num_slices} {rows}: 16 bits {before:.1f} {after:.1f}"
        f" chosen {chosen[0]:.1f} {chosen[1] and tuple(chosen[1])} tiles {sorted(found)}",
        flush=True,
    )


def considered(projection: Projection, name: str, all_rows: Sequence[int], *, only_chosen: bool) -> list[WideTile]:
    """Return the tiles that are considered, or chosen, for some of these rows."""
    n, k, slices, bits = projection.n, projection.k, projection.num_slices, KINDS[name].BITS
    processors = num_multiprocessors(torch.device("cuda"))
    if only_chosen:
        found = [wide_tiles.fastest(rows, n, k, slices, bits, processors)[1] for rows in all_rows]
        return list(dict.fromkeys(tile for tile in found if tile is not None))
    return [
        tile
        for tile in wide_tiles.tiles(slices, k)
        if any(wide_tiles.is_of_use(tile, rows, n, processors) for rows in all_rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=["int8-g128", "int4-g128"])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[160, 192, 256])
    parser.add_argument("--processes", type=int, default=12, help="that compile and check tiles before any is timed")
    parser.add_argument("--chosen", action="store_true", help="only tiles that the model chooses")
    parser.add_argument("--check", action="store_true", help="only compare bits")
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.wide_sweep")
    found = dict.fromkeys(p for name in arguments.shape for p in projections(SHAPES[name]))
    wanted = [
        (replace(p, slices=num_slices(p.n, p.k, bits=KINDS[name].BITS)), name) for p in found for name in arguments.kind
    ]
    tiles = [considered(*each, arguments.rows, only_chosen=arguments.chosen) for each in wanted]
    num_wrong, right = 0, []
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            [pool.submit(what_is_wrong, *each, tile) for tile in of_one]
            for each, of_one in zip(wanted, tiles, strict=True)
        ]
        for (projection, name), of_one, checks in zip(wanted, tiles, jobs, strict=True):
            said = [check.result() for check in checks]
            right.append([tile for tile, wrong in zip(of_one, said, strict=True) if not wrong])
            for tile, wrong in zip(of_one, said, strict=True):
                if wrong:
                    num_wrong += 1
                    print(f"{name} {projection.name} {projection.n}x{projection.k} {tuple(tile)}: {wrong}", flush=True)
    print(f"{sum(map(len, tiles))} tiles of {len(wanted)} products, {num_wrong} wrong", flush=True)
    with torch.inference_mode():
        for rows in () if arguments.check else arguments.rows:
            for (projection, name), of_one in zip(wanted, right, strict=True):
                timed(projection, rows, name, of_one, torch.device("cuda"))


if __name__ == "__main__":
    main()
