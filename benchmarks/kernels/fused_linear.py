"""The four fused projections of a layer and the head that draws, per bucket of rows: the matrix library's product
alone, ours with everything, the floor.

python -m benchmarks.kernels.fused_linear --sweep [--only head] [--buckets 8,64] [--out FILE]   # every tile, checked
and timed; rows of kernels/linear/tiles.py python -m benchmarks.kernels.fused_linear --warm 0/8             # only
compiles that share of them, into Triton's cache
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernels.timing import Shape, measure_us, shapes
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.linear import fused_linear, head, tiles
from photon_grpc.kernels.linear.fused_linear import Affine
from photon_grpc.kernels.linear.tiles import Problem, Tile
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Rotation
from photon_grpc.kernels.sampling import draw

# A streaming read of the weights, the fastest that one H200 was seen to do.
READ_BYTES_PER_SECOND = 4.5e12
CHAIN_BYTES = 160 << 20
BLOCK_SIZE = 64
VOCAB_SIZE = 128_256


@dataclass(frozen=True)
class Projection:
    """W [n, k] of one of the five, its pairs `span` rows apart."""

    model: str
    name: str
    n: int
    k: int
    span: int
    shape: Shape


def projections(device: torch.device) -> Iterator[Projection]:
    for model, s in shapes(device).items():
        yield Projection(model, "qkv", s.heads * s.head_dim, s.hidden, s.head_dim // 2, s)
        yield Projection(model, "o", s.hidden, s.q_heads * s.head_dim, 0, s)
        yield Projection(model, "gate_up", 2 * s.intermediate, s.hidden, s.intermediate, s)
        yield Projection(model, "down", s.hidden, s.intermediate, 0, s)
        yield Projection(model, "head", VOCAB_SIZE, s.hidden, 0, s)


class Chain:
    """Calls over as many different weights as the second-level cache cannot hold."""

    def __init__(self, projection: Projection, rows: int, device: torch.device) -> None:
        p, dtype = projection, projection.shape.dtype
        self.projection, self.rows = p, rows
        size = p.n * p.k * dtype.itemsize
        count = max(2 if size > CHAIN_BYTES else 8, CHAIN_BYTES // size)
        self.weights = [torch.randn(p.n, p.k, device=device, dtype=dtype) * 0.02 for _ in range(count)]
        self.x = torch.randn(rows, p.k, device=device, dtype=dtype)
        self.residual = torch.zeros(rows, p.n, device=device, dtype=dtype)
        self.y = torch.empty(rows, p.n // 2, device=device, dtype=dtype)
        q = torch.empty(rows, p.shape.q_heads * p.shape.head_dim, device=device, dtype=dtype)
        kv = p.shape.kv_heads, BLOCK_SIZE, p.shape.head_dim
        cache = torch.zeros(rows + 1, 1, 2, *kv, device=device, dtype=dtype)
        cos, sin = torch.randn(2, 512, p.shape.head_dim // 2, device=device)
        positions = torch.randint(0, 512, (rows,), device=device)
        rotation = Rotation(cos, sin, positions, torch.arange(rows, device=device) * 64 + 64)
        self.heads = HeadOutput(q, cache, 0, rotation)
        self.counters = torch.zeros(8192, dtype=torch.int32, device=device)
        number = torch.arange(rows, device=device)
        self.metadata = draw.SamplingMetadata(number, number, torch.zeros(rows, device=device), number, number, number)

    def call(self, w: torch.Tensor, tile: Tile, *, reference: bool = False) -> torch.Tensor:
        """One projection; returns the tensor that it wrote."""
        linear, end = Affine(w), () if reference else (tile, self.counters)
        if self.projection.name == "head":
            return head.logits_reference(self.x, w) if reference else head.logits_launch(self.x, w, tile)
        if self.projection.name == "qkv":
            qkv = fused_linear.qkv_reference if reference else fused_linear.qkv_launch
            qkv(self.x, linear, 1e-5, self.heads, *end)
            return torch.cat((self.heads.q.flatten(), self.heads.cache.flatten()))
        if self.projection.name == "gate_up":
            swiglu = fused_linear.swiglu_reference if reference else fused_linear.swiglu_launch
            swiglu(self.x, linear, 1e-5, self.y, *end)
            return self.y.flatten()
        add = fused_linear.add_reference if reference else fused_linear.add_launch
        add(self.residual, self.x, linear, *end)
        return self.residual.flatten()

    def launch(self, w: torch.Tensor, tile: Tile) -> None:
        """As `call`, nothing beside the kernel; the head draws."""
        linear, end = Affine(w), (tile, self.counters)
        if self.projection.name == "head":
            head.draw_launch(self.x, w, self.metadata, tile)
        elif self.projection.name == "qkv":
            fused_linear.qkv_launch(self.x, linear, 1e-5, self.heads, *end)
        elif self.projection.name == "gate_up":
            fused_linear.swiglu_launch(self.x, linear, 1e-5, self.y, *end)
        else:
            fused_linear.add_launch(self.residual, self.x, linear, *end)

    def error(self, tile: Tile) -> float:
        """Relative to the reference in float32, over one call."""
        results = []
        for reference in (True, False):
            for written in (self.residual, self.heads.cache):
                written.zero_()
            results.append(self.call(self.weights[0], tile, reference=reference).float())
        return float((results[1] - results[0]).norm() / results[0].norm())

    def us(self, call: Callable[[torch.Tensor], object]) -> float:
        return measure_us([partial(call, w) for w in self.weights], self.x.device, repeats=7)

    def tile_us(self, tile: Tile) -> float:
        return self.us(lambda w: self.launch(w, tile))

    def library_us(self) -> float:
        if self.projection.name == "head":
            return self.us(lambda w: draw.launch(torch.mm(self.x, w.T, out_dtype=torch.float32), self.metadata))
        out = torch.empty(self.rows, self.projection.n, device=self.x.device, dtype=self.x.dtype)
        return self.us(lambda w: torch.mm(self.x, w.T, out=out))

    def floor_us(self) -> float:
        return self.projection.n * self.projection.k * self.x.element_size() / READ_BYTES_PER_SECOND * 1e6


def candidates(projection: Projection, rows: int) -> list[Tile]:
    """Tiles with enough bytes of W in flight, and no more programs than are of use."""
    p = projection
    gemv = itertools.product(("gemv",), (16, 32), (64, 128, 256), (4, 8), (2, 3, 4, 6, 8))
    splits = (1, 2, 4, 8) if p.n < 8192 else (1,)
    wgmma = itertools.product(("wgmma",), (64, 128), (64, 128), (4, 8), (3, 4, 6, 8), splits)
    found = [Tile(*tile) for tile in gemv] if rows <= 32 else []  # type: ignore[arg-type]
    if rows >= 16:
        found += [Tile(*tile) for tile in wgmma if (tile[3] == 4 or tile[1] == 128)]  # type: ignore[arg-type]
    problem = Problem(p.n, p.k, rows, p.span)
    return [tile for tile in found if tiles.fits(tile, problem) and _is_useful(tile, p, rows)]


def _is_useful(tile: Tile, projection: Projection, rows: int) -> bool:
    slices = tile.KW if tile.kind == "gemv" else 1
    in_flight = 2 * tile.BN * tile.BK * slices * tile.NS
    steps = projection.k // (tile.BK * (tile.KW if tile.kind == "gemv" else tile.SPLITS))
    programs = projection.n // tile.BN * tile.SPLITS
    resident = min(programs, 132 * max(1, 220_000 // tiles.shared_bytes(tile, rows)))
    # Latency times bandwidth is about 4 MB; small registers files cannot hold 128 x 128 sums in four warps.
    enough = in_flight * resident >= 3 << 20 and 48 <= programs <= (8192 if projection.name == "head" else 2048)
    return enough and max(steps, 2) >= tile.NS and (tile.kind == "gemv" or rows * tile.BN <= 2048 * tile.KW)


def sweep(
    device: torch.device, names: list[str], buckets: list[int], share: tuple[int, int] | None, out: Path | None
) -> None:
    best: dict[str, dict[int, list[tuple[float, Tile]]]] = {}
    chosen = [projection for projection in projections(device) if not names or projection.name in names]
    for projection, rows in itertools.product(chosen, buckets):
        chain = None
        timed = []
        for number, tile in enumerate(candidates(projection, rows)):
            if share is not None:
                if number % share[1] == share[0]:
                    chain = chain or Chain(projection, rows, device)
                    with contextlib.suppress(RuntimeError):
                        chain.launch(chain.weights[0], tile)
                continue
            chain = chain or Chain(projection, rows, device)
            try:
                error = chain.error(tile)
            except RuntimeError as failure:
                print(f"FAILED {projection} {rows} {tile}: {str(failure)[:100]}", flush=True)
                continue
            if not error < 5e-3:
                print(f"WRONG {projection} {rows} {tile} error {error}", flush=True)
                continue
            timed.append((chain.tile_us(tile), tile))
        if not timed:
            continue
        timed.sort()
        best.setdefault(f"{projection.n},{projection.k}", {})[rows] = timed[:8]
        library, floor = chain.library_us(), chain.floor_us()
        line = " | ".join(f"{us:.2f} {tuple(tile)}" for us, tile in timed[:3])
        print(
            f"{projection.model} {projection.name:8s} {rows:4d} library {library:7.2f} floor {floor:6.2f} best {line}",
            flush=True,
        )
    if out is not None:
        out.write_text(json.dumps(best))


def table(kernels: Kernels, device: torch.device) -> None:
    """The committed tiles."""
    if device.type != "cuda":
        return
    for projection, rows in itertools.product(projections(device), tiles.BUCKETS):
        tile = tiles.choose(Problem(projection.n, projection.k, rows, projection.span))
        if tile is None:
            continue
        chain = Chain(projection, rows, device)
        us, floor = chain.tile_us(tile), chain.floor_us()
        print(
            f"fused_linear     {projection.model} {projection.name:8s} rows {rows:3d} {us:8.2f} us   library alone "
            f"{chain.library_us():8.2f} us   floor {floor:8.2f} us   {100 * floor / us:5.1f} %   {tuple(tile)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], choices=["qkv", "o", "gate_up", "down", "head"])
    parser.add_argument("--warm", help="I/N: compile the I-th of N shares")
    parser.add_argument("--buckets", default="8,16,32,64,128")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    share = None
    if arguments.warm:
        first, of = arguments.warm.split("/")
        share = int(first), int(of)
    buckets = [int(rows) for rows in arguments.buckets.split(",")]
    with torch.inference_mode():
        sweep(torch.device("cuda"), arguments.only, buckets, share, arguments.out)


if __name__ == "__main__":
    main()
