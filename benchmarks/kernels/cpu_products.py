"""Products on a CPU of weights of 16, 8 and 4 bits: each of a layer's and the head's, taken in turns.

    python -m benchmarks.kernels.cpu_products [--shape 1b] [--rows 1 4 16 64] [--threads 1 2] [--head] [--save NAME]

Random weights. "16 bits" is what `layers/prepacked.py` makes of a bfloat16 weight on this CPU, the others what
`layers/prepacked_quantized.py` makes of the formats, and torch's own products of them. Milliseconds are the least of
--repeats of each product, taken in turns, summed over the products; the share is that of 16 bits in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks import workloads
from benchmarks.saved import add_save_flag, saved
from photon_grpc.kernels.linear.decode import packed
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind
from photon_grpc.layers.prepacked import pack
from photon_grpc.layers.prepacked_quantized import pack_quantized

Product = Callable[[torch.Tensor], torch.Tensor]
#: Name -> (bits, columns that share a scale).
FORMATS = {"int8": (8, 0), "int8-g128": (8, 128), "int8-g32": (8, 32), "int4-g128": (4, 128)}


def sizes(shape: str, *, head: bool) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of the head's product, or of those of a layer."""
    s = workloads.SHAPES[shape]
    hidden, inner = s["hidden_size"], s["intermediate_size"]
    queries, kv = s["num_attention_heads"] * s["head_dim"], s["num_key_value_heads"] * s["head_dim"]
    if head:
        return {"head": (s["vocab_size"], hidden)}
    return {
        "qkv": (queries + 2 * kv, hidden),
        "o": (hidden, queries),
        "gate, up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def products(rows: int, columns: int, *, with_torch: bool) -> Iterator[tuple[str, Product]]:
    """Yield the products with a random weight, by name."""
    yield "16 bits", pack(torch.randn(rows, columns).mul_(0.02).bfloat16(), None) or _plain(rows, columns)
    for name, (bits, group) in FORMATS.items():
        product = pack_quantized(_drawn(rows, columns, bits, group), None)
        if product is not None:
            yield name, product
    if with_torch:
        yield from _torch(rows, columns)


def _plain(rows: int, columns: int) -> Product:
    return partial(_linear, torch.randn(rows, columns).mul_(0.02).bfloat16())


def _linear(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def _drawn(rows: int, columns: int, bits: int, group: int) -> QuantizedWeight:
    if bits == 8:
        values = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    else:
        values = packed(torch.randint(0, 16, (rows, columns), dtype=torch.uint8))
    scales = torch.rand(columns // group if group else 1, rows).mul_(1e-3).bfloat16()
    return QuantizedWeight(values, scales, kind=WeightKind(bits, group))


def _torch(rows: int, columns: int) -> Iterator[tuple[str, Product]]:
    values, scales = torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows).bfloat16()
    yield "torch's int8", lambda x: torch.ops.aten._weight_int8pack_mm(x, values, scales)
    tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.randint(0, 16, (rows, columns), dtype=torch.int32), 1
    )
    scales_zeros = torch.rand(columns // 128, rows, 2).bfloat16()
    yield "torch's int4-g128", lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, tiles, 128, scales_zeros)


@torch.inference_mode()
def measure(args: argparse.Namespace) -> None:
    """Print a row for each number of threads and of rows."""
    totals: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for outputs, inputs in sizes(args.shape, head=args.head).values():
        made = dict(products(outputs, inputs, with_torch=not args.head))
        for threads in args.threads:
            torch.set_num_threads(threads)
            for rows in args.rows:
                x = torch.randn(rows, inputs).bfloat16()
                for name, least in _least_s(made, x, args.repeats).items():
                    totals[threads, rows][name] += least
    names = list(next(iter(totals.values())))
    print(f"| threads | rows | {' | '.join(names)} |\n|--:|--:|{'--:|' * len(names)}")
    for (threads, rows), found in totals.items():
        cells = [f"{found[name] * 1e3:.2f} ({found[name] / found['16 bits']:.2f})" for name in names]
        print(f"| {threads} | {rows} | {' | '.join(cells)} |", flush=True)


def _least_s(made: dict[str, Product], x: torch.Tensor, repeats: int) -> dict[str, float]:
    least = dict.fromkeys(made, float("inf"))
    for _ in range(repeats):
        for name, multiply in made.items():
            begin_s = time.perf_counter()
            multiply(x)
            least[name] = min(least[name], time.perf_counter() - begin_s)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(workloads.SHAPES), default="1b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--head", action="store_true", help="the head instead of a layer")
    add_save_flag(parser)
    args = parser.parse_args()
    with saved(args.save):
        print(f"{args.shape}, {'the head' if args.head else 'the products of a layer'}, ms (share of 16 bits)\n")
        measure(args)


if __name__ == "__main__":
    main()
