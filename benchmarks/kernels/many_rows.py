"""Times products with K in slices at many rows: by the matrix library, and by the kernel that adds the slices.

    CUBLAS_WORKSPACE_CONFIG=:0:0 python -m benchmarks.kernels.many_rows [--shape 1b 3b] [--rows 256,2048]

Each product with its end, and what an end needs behind it, as a CUDA graph over as many weights as the second-level
cache cannot hold. "library": the slices' sums by a batch of the library. "added": `many_rows.py`, by its tiles.
"chosen": what serving takes. Every result is compared with the library's, bit for bit, before it is timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.sweep import EPS, Chain, Projection, projections
from benchmarks.kernels.timing import measure_us, needs_gpu, print_header
from benchmarks.shapes import SHAPES
from photon_grpc.kernels.lang.precompile import launches_collected, run_in_forks
from photon_grpc.kernels.linear import many_rows, slices
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.layers.operands import DenseOperands

CHAIN_BYTES = 160 << 20
ROWS = (136, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
Call = Callable[[torch.Tensor], None]


class Ways:
    """The ways to multiply one projection by `rows` rows with its end."""

    def __init__(self, projection: Projection, rows: int, device: torch.device) -> None:
        count = max(2, CHAIN_BYTES // (2 * projection.n * projection.k))
        self.chain = Chain(projection, rows, count, device)
        self.x, self.slices = self.chain.x, projection.num_slices

    def end(self, product: torch.Tensor) -> None:
        """Compute what follows the product, or its sums."""
        chain = self.chain
        if chain.heads is not None:
            rotate_store.launch(product, chain.x, None, EPS, chain.heads)
        else:
            slices.add_launch(chain.residual, product, None)

    def library(self, w: torch.Tensor) -> None:
        self.end(slices.products(self.x, w, self.slices))

    def added(self, w: torch.Tensor, tile: many_rows.ManyTile) -> None:
        if self.chain.heads is not None:
            self.end(many_rows.product(self.x, w, self.slices, tile))
        else:
            many_rows.add(self.chain.residual, self.x, w, None, self.slices, tile)

    def chosen(self, w: torch.Tensor) -> None:
        operands = DenseOperands(w, None, self.slices)
        if self.chain.heads is not None:
            operands.qkv(self.x, EPS, self.chain.heads)
        else:
            operands.add_to(self.chain.residual, self.x)

    def result(self, call: Call) -> torch.Tensor:
        """Return what the first weight gives."""
        chain = self.chain
        if chain.heads is None:
            chain.residual.copy_(
                torch.linspace(-1, 1, chain.residual.numel(), device=self.x.device).view_as(chain.residual)
            )
            call(chain.weights[0])
            return chain.residual.clone()
        chain.heads.cache.zero_()
        call(chain.weights[0])
        return torch.cat((chain.heads.q.flatten(), chain.heads.cache.flatten()))

    def us(self, call: Call) -> float:
        return measure_us([partial(call, w) for w in self.chain.weights], self.x.device)

    def all(self) -> Iterator[tuple[str, Call]]:
        for tile in many_rows.TILES:
            yield f"added {tile[:3]}", partial(self.added, tile=tile)
        yield "chosen", self.chosen


def compile_all(found: list[tuple[Projection, int]], device: torch.device) -> None:
    """Compile every kernel, side by side."""
    with launches_collected() as jobs:
        for projection, rows in found:
            ways = Ways(projection, rows, device)
            for _, call in [("library", ways.library), *ways.all()]:
                call(ways.chain.weights[0])
    torch.cuda.synchronize()
    done = run_in_forks(list(jobs), num_workers=os.cpu_count() or 1)
    print(f"{done} of {len(jobs)} kernels compiled", flush=True)


def row(projection: Projection, rows: int, device: torch.device) -> None:
    ways = Ways(projection, rows, device)
    expected = ways.result(ways.library)
    cells: list[Any] = [f"{ways.us(ways.library):.1f}"]
    for name, call in ways.all():
        try:
            is_equal = torch.equal(ways.result(call), expected)
            cells.append(f"{name}: {ways.us(call):.1f}{'' if is_equal else ' BITS DIFFER'}")
        except RuntimeError as failure:
            cells.append(f"{name}: failed, {str(failure)[:60]}")
    print(f"| {projection.n} x {projection.k} / {ways.slices} | {rows} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["1b"])
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.many_rows")
    device = torch.device("cuda")
    found = [p for shape in arguments.shape for p in projections(SHAPES[shape]) if p.num_slices > 1]
    all_rows = [int(rows) for rows in arguments.rows.split(",")]
    with torch.inference_mode():
        compile_all([(projection, rows) for projection in found for rows in (all_rows[0], all_rows[-1])], device)
        print_header("products with K in slices, µs", "rows", "library", "others")
        for projection in found:
            for rows in all_rows:
                row(projection, rows, device)


if __name__ == "__main__":
    main()
