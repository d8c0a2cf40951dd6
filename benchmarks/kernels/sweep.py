"""Times tiles on the products of public shapes, none of them of a shape that is held out; the library beside them.

    python -m benchmarks.kernels.sweep --out FILE.json      # on a GPU: what `fit.py` fits the model of cost to

Every product with its end (what is fused with it) as a CUDA graph over as many weights as the second-level cache cannot
hold, so that each launch overlaps the one before as in a layer. Tiles are those that the model of cost finds best;
their results are compared with float32 before they are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.kernels.timing import measure_us, needs_gpu
from benchmarks.shapes import HELD_OUT, SHAPES, Config
from photon_grpc.kernels import swiglu
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.precompile import launches_collected, run_in_forks
from photon_grpc.kernels.linear import cost, fused_linear, head, slices, tiles
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.fused_linear import Affine, Gate, ResidualStream
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.linear.weight import QuantizedWeight
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Rotation
from photon_grpc.kernels.sampling import sample
from photon_grpc.layers.operands import Operands

SWEPT = (
    "3b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "70b/8",
    "8b/4", "qwen2.5-7b/2", "qwen2.5-32b/2", "qwen3-14b/4", "qwen3-32b/2", "70b/2",
)  # fmt: skip
HEADS = ("3b", "qwen2.5-7b", "qwen3-0.6b")
#: Tiles to time of each product, the best by the model.
OF_EACH = 6
CHAIN_BYTES = 160 << 20
BLOCK_SIZE, EPS, MAX_ERROR = 64, 1e-5, 5e-3


@dataclass(frozen=True)
class Projection:
    """W [n, k] of one of a layer's four, or of the head, its pairs `span` rows apart."""

    name: str
    n: int
    k: int
    span: int
    #: A key of EPILOGUES in the cost model.
    epilogue: str
    #: Of queries, of keys.
    heads: tuple[int, int] = field(default=(1, 1), compare=False)
    #: Slices of K; 0: as serving cuts it.
    slices: int = 0

    @property
    def num_slices(self) -> int:
        return self.slices or num_slices(self.n, self.k)

    def product(self, rows: int) -> cost.Product:
        return cost.Product(self.n, self.k, rows, self.span, self.epilogue, self.num_slices)


def projections(shape: Config) -> Iterator[Projection]:
    """Return the four projections of a layer."""
    hidden, dim, inner = shape["hidden_size"], shape["head_dim"], shape["intermediate_size"]
    queries, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    rotary = "normed" if shape["model_type"] in ("qwen3", "gemma3_text") else "rotary"
    yield Projection("qkv", (queries + 2 * kv) * dim, hidden, dim // 2, rotary, (queries, kv))
    yield Projection("output", hidden, queries * dim, 0, "add")
    yield Projection("gate_up", 2 * inner, hidden, inner, "swiglu")
    yield Projection("down", hidden, inner, 0, "add")


def swept() -> list[Projection]:
    assert not HELD_OUT & {*SWEPT, *HEADS}
    found = [projection for name in SWEPT for projection in projections(SHAPES[name])]
    found += [Projection("head", SHAPES[name]["vocab_size"], SHAPES[name]["hidden_size"], 0, "head") for name in HEADS]
    return list(dict.fromkeys(found))


class Chain:
    """Calls over `count` different weights."""

    def __init__(self, projection: Projection, rows: int, count: int, device: torch.device) -> None:
        p, dtype = projection, torch.bfloat16
        self.projection, self.rows, self.slices = p, rows, p.num_slices
        generator = torch.Generator(device).manual_seed(p.n + p.k)
        self.weights = torch.randn(count, p.n, p.k, device=device, dtype=dtype, generator=generator) * 0.02
        self.x = torch.randn(rows, p.k, device=device, dtype=dtype, generator=generator)
        self.residual = torch.zeros(rows, p.n, device=device, dtype=dtype)
        self.partial = torch.empty(rows, p.n // squares.GROUP, device=device)
        self.stream = ResidualStream(self.x, squares.reference(self.x))
        self.y = torch.empty(rows, p.n // 2, device=device, dtype=dtype)
        self.counters = torch.zeros(8192, dtype=torch.int32, device=device)
        self.heads = self._heads(device) if p.epilogue in ("rotary", "normed") else None
        number, greedy = torch.arange(rows, device=device), torch.zeros(rows, device=device)
        self.metadata = sample.SamplingMetadata(number, number, greedy, number, number, number)

    def _heads(self, device: torch.device) -> HeadOutput:
        (queries, kv), dim = self.projection.heads, 2 * self.projection.span
        q = torch.empty(self.rows, queries * dim, device=device, dtype=self.x.dtype)
        cache = torch.zeros(self.rows + 1, 1, 2, kv, BLOCK_SIZE, dim, device=device, dtype=self.x.dtype)
        cos, sin = torch.randn(2, 512, dim // 2, device=device)
        slots = torch.arange(self.rows, device=device) * BLOCK_SIZE + BLOCK_SIZE
        positions = torch.randint(0, 512, (self.rows,), device=device)
        weights = torch.rand(2, dim, device=device).to(self.x.dtype) + 0.5
        norms = (weights[0], weights[1]) if self.projection.epilogue == "normed" else None
        return HeadOutput(q, cache, 0, Rotation(cos, sin, positions, slots), norms)

    def launch(self, w: torch.Tensor | QuantizedWeight, tile: Tile) -> None:
        linear, end = Affine(w, slices=self.slices), self.projection.epilogue
        if end == "head":
            head.sample_launch(self.x, linear, self.metadata, tile)
        elif self.heads is not None:
            fused_linear.qkv_launch(self.stream, linear, EPS, self.heads, tile, self.counters)
        elif end == "swiglu":
            fused_linear.swiglu_launch(self.stream, linear, Gate(EPS), self.y, tile, self.counters)
        else:
            fused_linear.add_launch(ResidualStream(self.residual, self.partial), self.x, linear, tile, self.counters)

    def library(self, w: torch.Tensor) -> None:
        """Multiply as `library` of the epilogues in `layers/epilogues.py` does."""
        end = self.projection.epilogue
        several = self.slices > 1
        if end == "head":
            sample.launch(torch.mm(self.x, w.t(), out_dtype=torch.float32), self.metadata)
        elif self.heads is not None:
            product = slices.products(self.x, w, self.slices) if several else self.x @ w.t()
            rotate_store.launch(product, self.x, None, EPS, self.heads)
        elif end == "add" and several:
            slices.add_launch(self.residual, slices.products(self.x, w, self.slices), None)
        elif end == "swiglu":
            swiglu.norm_launch(self.x @ w.t(), self.x, None, EPS, self.y)
        else:
            self.residual.addmm_(self.x, w.t())

    def reference(self) -> torch.Tensor:
        linear, end = Affine(self.weights[0]), self.projection.epilogue
        self._clear()
        if self.heads is not None:
            fused_linear.qkv_reference(self.x, linear, EPS, self.heads)
        elif end == "swiglu":
            fused_linear.swiglu_reference(self.x, linear, EPS, self.y)
        elif end == "add":
            fused_linear.add_reference(ResidualStream(self.residual, self.partial), self.x, linear)
        return self._written()

    def error(self, tile: Tile, expected: torch.Tensor) -> float:
        """Return the relative error of one call."""
        if self.projection.epilogue == "head":
            logits = head.logits_launch(self.x, Affine(self.weights[0]), tile)
            expected = head.logits_reference(self.x, Affine(self.weights[0]))
            return float((logits - expected).norm() / expected.norm())
        self._clear()
        self.launch(self.weights[0], tile)
        return float((self._written() - expected).norm() / expected.norm())

    def us(self, call: Callable[[torch.Tensor], object]) -> float:
        return measure_us([partial(call, w) for w in self.weights], self.x.device, repeats=7)

    def _clear(self) -> None:
        self.residual.zero_()
        self.y.fill_(torch.nan)
        if self.heads is not None:
            self.heads.q.fill_(torch.nan)
            self.heads.cache.zero_()

    def _written(self) -> torch.Tensor:
        """Return what the end writes, one after the other."""
        if self.heads is not None:
            return torch.cat((self.heads.q.flatten(), self.heads.cache.flatten())).float()
        return (self.y if self.projection.epilogue == "swiglu" else self.residual).float()


class Ended(Protocol):
    """What a product with an end reads and writes."""

    x: torch.Tensor
    y: torch.Tensor
    residual: torch.Tensor
    heads: HeadOutput | None


def multiply(of: Ended, end: str, operands: Operands) -> None:
    """Multiply with an end, as a layer does."""
    if of.heads is not None:
        operands.qkv(of.x, EPS, of.heads)
    elif end == "swiglu":
        operands.swiglu(of.x, EPS, of.y)
    else:
        operands.add_to(of.residual, of.x)


def candidates(product: cost.Product) -> list[Tile]:
    return sorted(cost.candidates(product), key=lambda tile: cost.tile_us(tile, product))[:OF_EACH]


def jobs(device: torch.device) -> list[Callable[[], Any]]:
    """Compile everything that is to be timed."""
    with launches_collected() as collected:
        for projection in swept():
            for rows in tiles.BUCKETS:
                chain = Chain(projection, rows, 1, device)
                for tile in candidates(projection.product(rows)):
                    chain.launch(chain.weights[0], tile)
    return collected


def num_weights(projection: Projection) -> int:
    """Return how many weights exceed the second-level cache."""
    size = 2 * projection.n * projection.k
    return max(2 if size > CHAIN_BYTES else 4, min(100, CHAIN_BYTES // size))


def timed(projection: Projection, rows: int, device: torch.device) -> dict[str, Any]:
    chain = Chain(projection, rows, num_weights(projection), device)
    expected = chain.reference()
    product = projection.product(rows)
    found: list[tuple[float, Tile]] = []
    for tile in candidates(product):
        try:
            error = chain.error(tile, expected)
            if not error < MAX_ERROR:
                print(f"WRONG {projection} {rows} {tuple(tile)} error {error}", flush=True)
                continue
            found.append((round(chain.us(lambda w, tile=tile: chain.launch(w, tile)), 2), tile))
        except RuntimeError as failure:
            print(f"FAILED {projection} {rows} {tuple(tile)}: {str(failure)[:100]}", flush=True)
    library = round(chain.us(chain.library), 2)
    found.sort()
    best = " | ".join(f"{us:.2f} {tuple(tile)}" for us, tile in found[:3])
    print(
        f"{projection.name:8s} {projection.n}x{projection.k} {rows:4d} library {library:7.2f} best {best}", flush=True
    )
    return {"product": product, "library": library, "tiles": [(us, *tile) for us, tile in found]}


def sweep(device: torch.device, out: Path) -> None:
    """Time every product and write the file after each."""
    results: list[dict[str, Any]] = []
    for projection in swept():
        results += [timed(projection, rows, device) for rows in tiles.BUCKETS]
        out.write_text("\n".join(json.dumps(result) for result in results) + "\n")


def compile_beside(device: torch.device) -> int:
    """Return the process that compiles while this one times, some seconds ahead of it."""
    begin_s = time.perf_counter()
    collected = jobs(device)
    print(f"{len(collected)} kernels found in {time.perf_counter() - begin_s:.1f} s", flush=True)
    compiler = os.fork()
    if not compiler:
        try:
            done = run_in_forks(collected, num_workers=max(1, (os.cpu_count() or 2) - 1))
            print(f"{done} compiled in {time.perf_counter() - begin_s:.1f} s", flush=True)
        finally:
            os._exit(0)
    time.sleep(min(20.0, len(collected) / 60))
    return compiler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.sweep")
    device = torch.device("cuda")
    with torch.inference_mode():
        compiler = compile_beside(device)
        sweep(device, arguments.out)
        os.waitpid(compiler, 0)


if __name__ == "__main__":
    main()
