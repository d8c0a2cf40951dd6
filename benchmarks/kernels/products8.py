"""Times products of 8-bit weights and 8-bit rows beside those of 16 bits, and compares bits with the library's.

    CUBLAS_WORKSPACE_CONFIG=:0:0 python -m benchmarks.kernels.products8 [--shape 8b qwen3-8b] [--rows 1,8,64] [--ways 4]
    … --many --rows 256,2048        # more rows than 128: by the matrix library, and by tiles of 128 and of 256 rows
    … --bits        # which forms of the library have our bits, its speed, and nothing else

Every product with its end behind the kernel that quantizes its rows, as a CUDA graph over as many weights as the
second-level cache cannot hold. "way": what the model of cost chooses; "best": the fastest of so many ways by the model,
which is printed where it is another; "library": in two kernels. The floor is the bytes of W over 4.2 TB/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.kernels.sweep import BLOCK_SIZE, CHAIN_BYTES, EPS, Projection, multiply, projections
from benchmarks.kernels.timing import measure_us, needs_gpu, print_header
from benchmarks.shapes import SHAPES
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import cost, fused8, fused_linear, library8, products8, quantize, tiles8, wide8
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.fused8 import Linear8
from photon_grpc.kernels.linear.fused_linear import Affine, Gate, ResidualStream
from photon_grpc.kernels.linear.products8 import Weight8
from photon_grpc.kernels.linear.tiles8 import Way, Weights
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Rotation
from photon_grpc.layers.operands import DenseOperands

FLOOR_BYTES_PER_US = 4.2e6
KINDS = {
    "w8a8": Weights(is_int=True),
    "fp8": Weights(is_int=False),
    "fp8-block": Weights(is_int=False, has_blocks=True),
}


class Case:
    """One projection of a layer, its input, and as many weights of one kind as the second-level cache cannot hold."""

    def __init__(self, projection: Projection, rows: int, name: str, device: torch.device) -> None:
        self.p, self.rows, self.kind = projection, rows, KINDS[name]
        n, k = projection.n, projection.k
        count = max(2, min(100, CHAIN_BYTES // (n * k)))
        self.weights = [self._weight(n, k, device) for _ in range(count)]
        dtype = torch.bfloat16
        memory = torch.randn(max(rows, 256), k, device=device).to(dtype)
        self.x = memory[:rows]
        self.partial = squares.reference(memory)[:rows]
        self.residual = torch.zeros(max(rows, 256), n, device=device, dtype=dtype)[:rows]
        self.sums = torch.empty(max(rows, 256), n // squares.GROUP, device=device)[:rows]
        self.y = torch.empty(rows, n // 2, device=device, dtype=dtype)
        self.counters = torch.zeros(8192, dtype=torch.int32, device=device)
        self.heads = self._heads(device) if projection.epilogue in ("rotary", "normed") else None

    def _weight(self, n: int, k: int, device: torch.device) -> Weight8:
        kind = torch.int8 if self.kind.is_int else torch.float8_e4m3fn
        values = (torch.randn(n, k, device=device) * 30).clamp(-127, 127).to(kind)
        shape = (-(-k // 128), -(-n // 128)) if self.kind.has_blocks else (1, n)
        return Weight8(values, torch.rand(shape, device=device) * 1e-3)

    def _heads(self, device: torch.device) -> HeadOutput:
        (queries, kv), dim = self.p.heads, 2 * self.p.span
        q = torch.empty(self.rows, queries * dim, device=device, dtype=self.x.dtype)
        cache = torch.zeros(self.rows + 1, 1, 2, kv, BLOCK_SIZE, dim, device=device, dtype=self.x.dtype)
        cos, sin = torch.randn(2, 512, dim // 2, device=device)
        slots = torch.arange(self.rows, device=device) * BLOCK_SIZE + BLOCK_SIZE
        weights = torch.rand(2, dim, device=device).to(self.x.dtype) + 0.5
        norms = (weights[0], weights[1]) if self.p.epilogue == "normed" else None
        return HeadOutput(q, cache, 0, Rotation(cos, sin, slots % 512, slots), norms)

    def launch(self, way: Way, w: Weight8) -> None:
        linear, of_x = Linear8(w), ResidualStream(self.x, self.partial)
        if self.heads is not None:
            fused8.qkv_launch(of_x, linear, EPS, self.heads, way, self.counters)
        elif self.p.epilogue == "swiglu":
            fused8.swiglu_launch(of_x, linear, Gate(EPS), self.y, way, self.counters)
        else:
            fused8.add_launch(ResidualStream(self.residual, self.sums), self.x, linear, way, self.counters)

    def apart(self, w: Weight8) -> None:
        """Multiply by the library, where it takes the weight, in two kernels."""
        library8.scaled(products8.quantized(self.x, w), w.values, w.scales, self.x.dtype)

    def many(self, w: Weight8) -> None:
        """Multiply many rows, with the end."""
        if self.heads is not None:
            fused8.qkv_apart(self.x, Linear8(w), EPS, self.heads)
        elif self.p.epilogue == "swiglu":
            fused8.swiglu_apart(self.x, Linear8(w), EPS, self.y)
        else:
            fused8.add_apart(self.residual, self.x, Linear8(w))

    def written(self) -> torch.Tensor:
        """Return what the end writes."""
        if self.heads is not None:
            return torch.cat((self.heads.q.flatten(), self.heads.cache.flatten()))
        return (self.y if self.p.epilogue == "swiglu" else self.residual).clone()

    def sixteen(self, w: torch.Tensor) -> None:
        """Multiply 16 bits by the tile that is chosen for them, or by the library."""
        linear, of_x = Affine(w, slices=num_slices(self.p.n, self.p.k)), ResidualStream(self.x, self.partial)
        bucket = tiles8.bucket(self.rows)
        tile = cost.choose(self.p.product(bucket)) if bucket and bucket <= 128 else None
        if tile is None:
            multiply(self, self.p.epilogue, DenseOperands(w, None, num_slices(self.p.n, self.p.k)))
        elif self.heads is not None:
            fused_linear.qkv_launch(of_x, linear, EPS, self.heads, tile, self.counters)
        elif self.p.epilogue == "swiglu":
            fused_linear.swiglu_launch(of_x, linear, Gate(EPS), self.y, tile, self.counters)
        else:
            stream = ResidualStream(self.residual, self.sums)
            fused_linear.add_launch(stream, self.x, linear, tile, self.counters)

    def sixteen_us(self) -> float:
        shape = max(2, CHAIN_BYTES // (2 * self.p.n * self.p.k)), self.p.n, self.p.k
        weights = torch.randn(shape, device=self.x.device, dtype=self.x.dtype)
        return measure_us([partial(self.sixteen, w) for w in weights], self.x.device)

    def us(self, call: Callable[[Weight8], None]) -> float:
        return measure_us([partial(call, w) for w in self.weights], self.x.device)

    def ways(self, most: int) -> Iterator[Way]:
        """Return the way that is chosen, then the others from the cheapest on."""
        bucket = tiles8.bucket(self.rows)
        product = self.p.product(bucket or 0)
        found = tiles8.candidates(product, self.kind)
        yield from sorted(found, key=lambda way: tiles8.way_us(way, product))[:most]


def timed(projection: Projection, rows: int, name: str, most: int, device: torch.device) -> None:
    case = Case(projection, rows, name, device)
    found = []
    for way in case.ways(most):
        try:
            found.append((case.us(partial(case.launch, way)), way))
        except RuntimeError as failure:
            print(f"FAILED {projection.name} {rows} {name} {tuple(way)}: {str(failure)[:100]}", flush=True)
    library = case.us(case.apart) if library8.takes(*case.weights[0][:2]) else None
    quantizing = case.us(lambda w: products8.quantized(case.x, w) and None)
    sixteen = case.sixteen_us()
    first, best = (f"{found[0][0]:.2f}", min(found)) if found else ("–", None)
    floor = projection.n * projection.k / FLOOR_BYTES_PER_US
    cells = [first, f"{best[0]:.2f}" if best else "–", "–" if library is None else f"{library:.2f}"]
    cells += [f"{sixteen:.2f}", f"{quantizing:.2f}", f"{floor:.2f}", str(tuple(best[1])) if best else "–"]
    print(f"| {projection.name} {name} {rows} | {' | '.join(cells)} |", flush=True)


def timed_many(projection: Projection, rows: int, name: str, device: torch.device) -> None:
    """Print the microseconds of a product of many rows with its end, from 16 bits to 16 bits."""
    case = Case(projection, rows, name, device)
    cells, written = [], []
    for size in wide8.SIZES:
        forced = {
            "choose": lambda *_, size=size, **__: size,
            "takes": lambda *_: True,
            "compiled_once": lambda *_, **__: None,
        }
        if case.kind.has_blocks and size not in wide8.sizes(has_blocks=True):
            cells.append("–")
            continue
        with patch.multiple(wide8, **forced):
            case.residual.zero_()
            case.many(case.weights[0])
            written.append(case.written())
            cells.append(f"{case.us(case.many):.1f}")
        if not torch.equal(written[0], written[-1]):
            cells[-1] += " WRONG"
    with patch.object(wide8, "takes", lambda *_: False):
        before = partial(case.launch, next(case.ways(1))) if rows <= wide8.PART else case.many
        cells.insert(0, f"{case.us(before):.1f}")
    cells += [
        f"{case.sixteen_us():.1f}",
        str(tuple(wide8.choose(rows, projection.n, projection.k, 132, has_blocks=case.kind.has_blocks))),
    ]
    print(f"| {projection.name} {name} {rows} | {' | '.join(cells)} |", flush=True)


def compare_bits(device: torch.device) -> None:
    """Print which forms of the library's e4m3 product have the bits of our kernel, and how fast it is."""
    print_header("bits of the library", "rows", "of fp32 sums equal", "TFLOP/s")
    for n, k in ((6144, 4096), (4096, 14336), (2048, 2048)):
        for rows in (64, 512, 4096):
            x = torch.randn(rows, k, device=device).bfloat16()
            for name, call in _forms(n, k, x).items():
                try:
                    ours, theirs, us = call()
                    print(f"| {name} {n} x {k} | {rows} | {(ours == theirs).float().mean():.6f} | "
                          f"{2e-6 * rows * n * k / us:.0f} |", flush=True)  # fmt: skip
                except RuntimeError as failure:
                    print(f"| {name} {n} x {k} | {rows} | {str(failure)[:80]} | – |", flush=True)


def _forms(n: int, k: int, x: torch.Tensor) -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor, float]]]:
    def of(name: str, dtype: torch.dtype, *, has_scales: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
        kind = KINDS[name]
        values = (torch.randn(n, k, device=x.device) * 30).to(torch.float8_e4m3fn)
        shape = (k // 128, n // 128) if kind.has_blocks else (1, n)
        w = Weight8(values, torch.rand(shape, device=x.device) * 1e-3)
        rows = quantize.launch(x, torch.float8_e4m3fn, grouped=kind.has_blocks)
        one = torch.ones((), device=x.device)
        # The library takes scales of blocks [K / 128, N / 128] as the transposed weight has them, N side by side.
        scales = (rows.scales.view(-1, 1), w.scales) if not kind.has_blocks else (rows.scales, w.scales)
        scale_a, scale_b = scales if has_scales else (one, one)

        def theirs() -> torch.Tensor:
            return torch._scaled_mm(
                rows.values, values.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=False
            )

        mine = products8.multiply(rows, w, dtype) if has_scales else _sums(rows.values, w)
        return mine, theirs(), measure_us([theirs], x.device)

    return {
        "one scale, fp32": lambda: of("fp8", torch.float32, has_scales=False),
        "row scales, bf16": lambda: of("fp8", torch.bfloat16, has_scales=True),
        "block scales, bf16": lambda: of("fp8-block", torch.bfloat16, has_scales=True),
    }


def _sums(values: torch.Tensor, w: Weight8) -> torch.Tensor:
    """Return the float32 sums of our kernel."""
    ones = torch.ones(values.shape[0] + 256, device=values.device)[: values.shape[0]]
    y = torch.empty(values.shape[0], w.values.shape[0], device=values.device)
    rows = quantize.QuantizedRows(values, ones)
    one = Weight8(w.values, torch.ones(1, w.values.shape[0], device=values.device))
    products8.launch(products8.PLAIN, products8.PARTS[1], one, rows, y, in_parts=True)
    return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--rows", default="1,8,16,64,256")
    parser.add_argument("--format", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--ways", type=int, default=4)
    parser.add_argument("--product", nargs="+", default=["qkv", "output", "gate_up", "down"])
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--bits", action="store_true")
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.products8")
    device = torch.device("cuda")
    with torch.inference_mode():
        if arguments.bits:
            return compare_bits(device)
        for shape in arguments.shape if arguments.many else ():
            print_header(
                shape,
                "before",
                *(f"{128 * size.parts} x {64 * size.halves}" for size in wide8.SIZES),
                "16 bits",
                "chosen",
            )
            for projection in projections(SHAPES[shape]):
                for name in arguments.format if projection.name in arguments.product else ():
                    for rows in map(int, arguments.rows.split(",")):
                        timed_many(projection, rows, name, device)
        for shape in () if arguments.many else arguments.shape:
            print_header(shape, "way", "best", "library", "16 bits", "quantize alone", "floor", "best way")
            for projection in projections(SHAPES[shape]):
                for name in arguments.format:
                    for rows in map(int, arguments.rows.split(",")):
                        timed(projection, rows, name, arguments.ways, device)
    return None


if __name__ == "__main__":
    main()
