"""Times every tile that is considered for packed weights, beside 16 bits, and checks the bits of each.

    python -m benchmarks.kernels.packed_sweep --kind int8-g128 int4-g128 --shape 8b qwen3-8b --rows 8 64

A line a product: microseconds of the best tile and of the tile that the model of cost chooses, of 16 bits (the chosen
tile, or the library), and the time that its bytes need at 4.2 TB/s. What a tile writes is compared bit for bit with
the library's product of the dequantized weight.
"""

from __future__ import annotations

import os

# The library may not split K; it reads this once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.sweep import Chain, Projection, num_weights, projections
from benchmarks.kernels.timing import measure_us, needs_gpu
from benchmarks.shapes import SHAPES
from photon_grpc.kernels.linear import cost, dequantize, tiles
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.decode import arrange
from photon_grpc.kernels.linear.tiles import Tile, step_bytes
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind

KINDS = {
    "int8": WeightKind(8),
    "int8-g32": WeightKind(8, 32),
    "int8-g64": WeightKind(8, 64),
    "int8-g128": WeightKind(8, 128),
    "int4-g128": WeightKind(4, 128),
    "int4-g64": WeightKind(4, 64),
    "int4-g32": WeightKind(4, 32),
    "awq": WeightKind(4, 128, True, True),
}
MEMORY_BYTES_PER_US = 4.2e6


class PackedChain(Chain):
    """Calls over `count` packed weights."""

    def __init__(
        self, projection: Projection, rows: int, kind: WeightKind, device: torch.device, count: int = 1
    ) -> None:
        super().__init__(projection, rows, 1, device)
        self.kind = kind
        self.packed = [self._random(seed, device) for seed in range(count)]
        self.weights[0].copy_(self._dense(self.packed[0]))

    def _random(self, seed: int, device: torch.device) -> QuantizedWeight:
        n, k, kind, dtype = self.projection.n, self.projection.k, self.kind, self.x.dtype
        generator = torch.Generator(device).manual_seed(seed)
        groups = k // kind.GROUP if kind.GROUP else 1
        values = torch.randint(0, 256, (n, k * kind.BITS // 8), device=device, dtype=torch.uint8, generator=generator)
        values = values.view(torch.int8) if kind.BITS == 8 else values
        scales = (torch.rand(groups, n, device=device, generator=generator) * 0.04 / 2**kind.BITS).to(dtype)
        zeros = torch.randint(0, 16, (groups, n), device=device).to(dtype) if kind.HAS_ZEROS else None
        norm = torch.rand(k, device=device).to(dtype) + 0.5 if kind.HAS_NORM else None
        return QuantizedWeight(arrange(values, kind.BITS).contiguous(), scales, zeros, norm, kind, is_arranged=True)

    def _dense(self, packed: QuantizedWeight) -> torch.Tensor:
        w = torch.empty(packed.shape, device=self.x.device, dtype=self.x.dtype)
        dequantize.launch(packed, w)
        return w

    def is_equal(self, tile: Tile) -> bool:
        """Return whether a call writes the bits that the library's product of the dequantized weight has."""
        self._clear()
        self.library(self.weights[0])
        expected = self._written()
        self._clear()
        self.launch(self.packed[0], tile)
        return torch.equal(self._written(), expected)

    def packed_us(self, tile: Tile) -> float:
        return measure_us([partial(self.launch, w, tile) for w in self.packed], self.x.device, repeats=7)


def us_of_16_bits(projection: Projection, rows: int, device: torch.device) -> float:
    """Return what serving takes of a weight of 16 bits."""
    projection = replace(projection, slices=0)
    chain = Chain(projection, rows, num_weights(projection), device)
    tile = cost.choose(projection.product(rows))
    return chain.us(chain.library if tile is None else lambda w: chain.launch(w, tile))


def right_tiles(projection: Projection, rows: int, name: str, share: slice) -> list[Tile]:
    """Return those of a share of the candidates that write the right bits; compile each, and name the others."""
    kind, found = KINDS[name], []
    with torch.inference_mode():
        chain = PackedChain(projection, rows, kind, torch.device("cuda"))
        for tile in cost.candidates(projection.product(rows)._replace(weight=kind))[share]:
            try:
                if chain.is_equal(tile):
                    found.append(tile)
                else:
                    print(
                        f"WRONG {name} {projection.name} {projection.n}x{projection.k} {rows} {tuple(tile)}", flush=True
                    )
            except RuntimeError as failure:
                print(f"FAILED {name} {projection.name} {rows} {tuple(tile)}: {str(failure)[:100]}", flush=True)
    return found


def timed(projection: Projection, rows: int, name: str, right: list[Tile], device: torch.device) -> dict[str, Any]:
    kind = KINDS[name]
    product = projection.product(rows)._replace(weight=kind)
    # As many weights as together exceed the second-level cache.
    chain = PackedChain(projection, rows, kind, device, num_weights(projection) * 16 // kind.BITS)
    found = [(round(chain.packed_us(tile), 2), tile) for tile in right]
    chosen = cost.choose(product, may_decline=False)
    whole = Tile("gemv", projection.n, projection.k, 1, 1)
    floor = step_bytes(whole, kind, projection.k, 1) / MEMORY_BYTES_PER_US
    del chain
    before = us_of_16_bits(projection, rows, device)
    return {
        "kind": name, "product": [projection.name, projection.n, projection.k, rows], "floor": round(floor, 2),
        "16 bits": round(before, 2), "chosen": next((us for us, tile in found if tile == chosen), None),
        "tiles": sorted((us, *tile) for us, tile in found),
    }  # fmt: skip


def _num_slices(projection: Projection, kind: WeightKind) -> int:
    return num_slices(projection.n, projection.k, bits=kind.BITS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=["int8-g128", "int8", "int4-g128"])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--rows", nargs="+", type=int, choices=tiles.BUCKETS, default=tiles.BUCKETS)
    parser.add_argument("--slices", type=int, default=0, help="of K, to try another cut; 0: as serving cuts it")
    parser.add_argument("--processes", type=int, default=8, help="that compile and check tiles before any is timed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.packed_sweep")
    device, lines = torch.device("cuda"), []
    wanted = [
        (replace(projection, slices=arguments.slices or _num_slices(projection, KINDS[name])), rows, name)
        for projection in dict.fromkeys(
            p for name in arguments.shape for p in projections(SHAPES[name]) if p.epilogue != "head"
        )
        for rows in arguments.rows
        for name in arguments.kind
    ]
    shares = [slice(first, None, 4) for first in range(4)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool:
        checks = [[pool.submit(right_tiles, *each, share) for share in shares] for each in wanted]
        right = [[tile for check in of_one for tile in check.result()] for of_one in checks]
    with torch.inference_mode():
        for each, found in zip(wanted, right, strict=True):
            line = timed(*each, found, device)
            lines.append(json.dumps(line))
            print(f"{each[2]} {line['product']} floor {line['floor']} 16 bits {line['16 bits']}"
                  f" chosen {line['chosen']} best {line['tiles'][:3]}", flush=True)  # fmt: skip
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
