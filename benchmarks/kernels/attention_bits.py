"""Bits and times of attention: one query's answer by every kernel, tile and batch, and microseconds of a layer.

python -m benchmarks.kernels.attention_bits [--bits] [--times] [--shapes 0,1] [--blocks 64] [--windows 0,512] [--kv fp8]

The first table lists the ways in which the last query of a context was computed, how many of them differ in any bit
from the decode kernel alone, and by how much; and the largest error against attention in float32. The second times
launches of the kernels that `dispatch` chooses, over layers that the second-level cache does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.timing import measure_us, needs_gpu, num_copies, print_header
from photon_grpc.kernels import AttentionMetadata, DependentChain
from photon_grpc.kernels.attention.decode_ring import PageShape
from photon_grpc.kernels.attention.dispatch import dispatch
from photon_grpc.kernels.attention.gluon_decode import shape
from photon_grpc.kernels.attention.hopper_varlen import numbers_of_consumers
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE, PageScales

DEVICE = torch.device("cuda")
#: (query heads, key heads, head_dim).
SHAPES = ((32, 8, 64), (32, 8, 128), (32, 32, 128), (15, 5, 64), (28, 4, 128), (14, 2, 64), (8, 4, 256), (4, 1, 256))
BLOCK_SIZES = (64, 16, 128)
CONTEXTS = (1, 2, 5, 63, 64, 65, 127, 128, 129, 272, 511, 512, 513, 1000, 1025, 2048, 4097, 9000)
CHUNKS = (2, 3, 17, 64, 200, 1000)
#: Queries of rows that the decode kernel takes.
FEW = (2, 3, 4, 8)
#: (KW, NS, most programs of a row) of the decode kernel, forced for pages of 64.
TILES = ((1, 2, 1), (2, 3, 1), (4, 6, 1), (4, 1, 1), (4, 3, 2), (4, 3, 3), (2, 3, 7), (4, 6, 132))
#: (queries of each row, keys of each row).
DECODE = ((1, 272), (8, 272), (64, 272), (256, 272), (64, 2000), (8, 8192), (32, 8192), (1, 32000))
PROMPTS = ((1, 128), (8, 128), (1, 512), (8, 512), (1, 2048), (8, 2048), (1, 8192), (1, 32000))
#: A row: how many queries, and at how many keys.
Row = tuple[int, int]


class Sequence:
    """One random sequence in pages of random order, NaN in every place that no row may read; layer 1 of 2."""

    def __init__(
        self, heads: tuple[int, int, int], block_size: int, length: int, window: int = 0, *, in_8_bits: bool = False
    ) -> None:
        q_heads, kv_heads, head_dim = heads
        torch.manual_seed(q_heads * head_dim + block_size)
        pages = -(-length // block_size)
        self.heads, self.window = heads, window
        self.q = torch.randn(length, q_heads, head_dim, device=DEVICE).bfloat16()
        self.keys, self.values = torch.randn(2, length, kv_heads, head_dim, device=DEVICE).bfloat16().unbind()
        sizes = pages + 3, 2, 2, kv_heads, block_size, head_dim
        self.scales, kind = None, torch.bfloat16
        if in_8_bits:
            kind, scales = PAGE_DTYPE, PageScales.ones(kv_heads, torch.zeros(1, dtype=torch.int64, device=DEVICE))
            scales.set(0.02 + 0.1 * torch.rand(2, kv_heads, device=DEVICE))
            self.scales = scales, scales
            of_keys, of_values = (each[:, None] for each in scales.scales)
            self.keys, self.values = self.keys / of_keys, self.values / of_values
        self.cache = torch.full(sizes, torch.nan, device=DEVICE).to(kind)
        self.blocks = torch.randperm(pages + 2, device=DEVICE)[:pages] + 1
        padded = torch.full((2, pages * block_size, kv_heads, head_dim), torch.nan, device=DEVICE).to(kind)
        padded[0, :length], padded[1, :length] = self.keys, self.values
        of_pages = padded.view(2, pages, block_size, kv_heads, head_dim).permute(1, 0, 3, 2, 4)
        raw = torch.uint8 if in_8_bits else torch.int16
        self.cache.view(raw)[self.blocks, 1] = of_pages.contiguous().view(raw)
        if self.scales is not None:
            self.keys, self.values = padded[0, :length].float() * of_keys, padded[1, :length].float() * of_values

    @property
    def shape(self) -> PageShape:
        q_heads, kv_heads, _ = self.heads
        return shape(q_heads // kv_heads, self.cache, self.window)

    def attend(self, rows: list[Row], *, chain: DependentChain | None = None, longest: int = 0) -> list[torch.Tensor]:
        """Return the answers [queries, Hq, D] of every row; all rows are prefixes of the sequence."""
        counts, contexts = [row[0] for row in rows], [row[1] for row in rows]
        tables = self.blocks.int().expand(len(rows), -1).contiguous()
        for table, (count, context) in zip(tables, rows, strict=True):
            # Pages before the window are no longer the row's.
            table[: max(0, context - count + 1 - self.window) // self.cache.shape[4] if self.window else 0] = 0
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
        meta = AttentionMetadata(
            starts, torch.tensor(contexts, dtype=torch.int32, device=DEVICE), tables, self.heads[2] ** -0.5,
            max_query_len=max(counts), max_context_len=max(longest, *contexts), min_query_len=min(counts),
            window=self.window, kv_scales=self.scales,
        )  # fmt: skip
        q = torch.cat([self.q[context - count : context] for count, context in rows])
        slots = torch.zeros(q.shape[0], dtype=torch.int64, device=DEVICE)
        out = torch.full_like(q, torch.nan)
        spec = AttentionSpec(self.heads[0], meta.scale, q.dtype)
        dispatch(spec, meta, self.cache, slots, chain).attend(q, 1, out)
        return list(out.split(counts))

    def expected(self, context: int) -> torch.Tensor:
        """Return the last query's answer in float32."""
        q_heads, kv_heads, head_dim = self.heads
        q = self.q[context - 1].view(kv_heads, q_heads // kv_heads, head_dim).float()
        first = max(0, context - self.window) if self.window else 0
        scores = torch.einsum("hgd,nhd->hgn", q.double(), self.keys[first:context].double()) * head_dim**-0.5
        answer = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), self.values[first:context].double())
        return answer.reshape(q_heads, head_dim).float()


@dataclasses.dataclass
class Count:
    ways: int = 0
    different: int = 0
    most: float = 0.0
    example: str = ""


class Differences:
    """How often and how far answers differ, by the way in which they were computed."""

    def __init__(self) -> None:
        self.counts: dict[str, Count] = {}

    def compare(self, way: str, case: str, compute: Callable[[], torch.Tensor], wanted: torch.Tensor) -> None:
        count = self.counts.setdefault(way, Count())
        count.ways += 1
        try:
            found = compute()
            torch.cuda.synchronize()
        except Exception as error:
            count.different += 1
            count.example = count.example or f"{case}: {type(error).__name__} {str(error).strip()[-300:]}"
            return
        if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
            count.different += 1
            apart = (found.float() - wanted.float()).abs().nan_to_num(nan=torch.inf).max().item()
            if not count.example or apart > count.most:
                count.example = case
            count.most = max(count.most, apart)

    def error(self, case: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        count = self.counts.setdefault("error against float32", Count())
        count.ways += 1
        apart = (found.float() - wanted).abs().nan_to_num(nan=torch.inf).max().item()
        if apart > count.most:
            count.most, count.example = apart, case

    def print(self) -> None:
        print_header("Bits", "compared", "different", "most", "where")
        for way, count in self.counts.items():
            print(f"| {way} | {count.ways} | {count.different} | {count.most:.2e} | {count.example} |", flush=True)


@contextmanager
def forced(**names: Any) -> Iterator[None]:
    """Let the decode kernel choose otherwise, the prompt kernel another number of consumers."""
    from photon_grpc.kernels.attention import gluon_decode, hopper_varlen

    modules = {"choose": gluon_decode, "num_consumers": hopper_varlen}
    before = {name: getattr(modules[name], name) for name in names}
    try:
        for name, value in names.items():
            setattr(modules[name], name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(modules[name], name, value)


def with_tile(warps: int, steps: int, splits: int) -> Callable[..., Any]:
    from photon_grpc.kernels.attention.decode_tiles import SCRATCH_BYTES, choose, ring_bytes

    def chosen(*arguments: Any) -> Any:
        tile, _ = choose(*arguments)
        _, of_pages, _, limits = arguments
        room = (limits.shared_bytes - SCRATCH_BYTES) // ring_bytes(tile.UPDATE, 1, of_pages)
        return tile._replace(KW=warps, NS=min(steps, room), SHARED=splits > 1), splits

    return chosen


def chain_for(rows: int, kv_heads: int, *, early: bool = False) -> DependentChain:
    return DependentChain(torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE), early)


def compare_context(sequence: Sequence, case: str, context: int, found: Differences, *, tiles: bool) -> None:
    kv_heads = sequence.heads[1]
    alone = [(1, context)]
    chain = partial(chain_for, kv_heads=kv_heads)
    try:
        wanted = sequence.attend(alone, chain=chain(1))[0][-1]
    except Exception as error:
        found.compare("decode alone", case, partial(_raise, error), torch.empty(0, device=DEVICE))
        return
    found.error(case, wanted, sequence.expected(context))

    def last(rows: list[Row], row: int = 0, **options: Any) -> Callable[[], torch.Tensor]:
        return lambda: sequence.attend(rows, **options)[row][-1]

    found.compare("decode, early", case, last(alone, chain=chain(1, early=True)), wanted)
    found.compare("decode, model of 131,072", case, last(alone, chain=chain(1), longest=131072), wanted)
    found.compare("decode outside a chain", case, last(alone), wanted)
    others = random.Random(context)
    company = [(1, others.randint(1, len(sequence.q))) for _ in range(64)]
    company[37] = (1, context)
    for rows in (2, 9, 64):
        batch = company[37 : 37 + rows] if rows < 64 else company
        row = batch.index((1, context))
        found.compare(f"decode of {rows} rows", case, last(batch, row, chain=chain(rows, early=True)), wanted)
    mixed = [(min(130, len(sequence.q)), len(sequence.q)), (1, 7), (1, context), (3, 5)]
    found.compare("decode in a mixed step", case, last(mixed, 2), wanted)
    for tile in TILES if tiles else ():
        with forced(choose=with_tile(*tile)):
            found.compare(f"decode, forced {tile}", case, last(alone, chain=chain(1, early=True)), wanted)
    for few in FEW:
        if few <= context:
            way = f"decode of {few} queries"
            found.compare(way, case, last([(few, context)], chain=chain(8, early=True)), wanted)
            company = [(1, 9), (few, context), (1, len(sequence.q))] * 20
            found.compare(f"{way} among others", case, last(company, 1), wanted)
    for chunk in (*CHUNKS, context):
        if 2 <= chunk <= context:
            way = "whole prompt" if chunk == context else f"prompt's last {chunk}"
            found.compare(way, f"{case} {chunk}", last([(chunk, context)]), wanted)
    if context >= 2:
        for consumers in numbers_of_consumers(sequence.shape):
            with forced(num_consumers=lambda *_, found=consumers: found):
                rows = [(min(40, context), context), (1, 9), (min(300, len(sequence.q)), len(sequence.q))]
                found.compare(f"prompt among others, {consumers} consumers", case, last(rows), wanted)


def _raise(error: Exception) -> torch.Tensor:
    raise error


def compare_every_position(sequence: Sequence, case: str, found: Differences) -> None:
    """Compare all answers of a whole prompt with chunks of it, and with decode at some of its positions."""
    length = len(sequence.q)
    whole = sequence.attend([(length, length)])[0]
    for chunk in (48, 777):
        ends = [*range(chunk, length, chunk), length]
        rows = [(end - begin, end) for begin, end in itertools.pairwise([0, *ends])]
        found.compare(
            f"all of a prompt in chunks of {chunk}", case, lambda rows=rows: torch.cat(sequence.attend(rows)), whole
        )
    positions = random.Random(3).sample(range(length), 200)
    rows = [(1, position + 1) for position in positions]
    found.compare("decode at 200 positions", case, lambda: torch.cat(sequence.attend(rows)), whole[positions])


def compare_all(
    shapes: list[int], blocks: list[int], windows: list[int], found: Differences, *, in_8_bits: bool
) -> None:  # fmt: skip
    for number, block_size, window in itertools.product(shapes, blocks, windows):
        heads = SHAPES[number]
        sequence = Sequence(heads, block_size, max(CONTEXTS), window, in_8_bits=in_8_bits)
        of_all = f"{heads} pages of {block_size} window {window}"
        for context in CONTEXTS:
            compare_context(sequence, f"{of_all} context {context}", context, found, tiles=block_size == 64)
        try:
            compare_every_position(sequence, of_all, found)
        except Exception as error:
            print(f"{of_all}: {type(error).__name__}: {error}", flush=True)


def compile_all(shapes: list[int], blocks: list[int], windows: list[int], *, in_8_bits: bool) -> None:
    """Compile the kernels of all comparisons side by side."""
    from photon_grpc.kernels.lang.precompile import launches_collected, run_in_forks

    with launches_collected() as jobs:
        compare_all(shapes, blocks, windows, Differences(), in_8_bits=in_8_bits)
    torch.cuda.empty_cache()
    done = run_in_forks(jobs, num_workers=os.cpu_count() or 1)
    print(f"{done} of {len(jobs)} kernels compiled", flush=True)


# -- times ---------------------------------------------------------------------------------------------------------


def layer_us(
    heads: tuple[int, int, int], counts: list[int], contexts: list[int], *, in_8_bits: bool = False
) -> float:  # fmt: skip
    """Return microseconds of one layer; decode rows run in a dependent chain."""
    block_size = 64
    q_heads, kv_heads, head_dim = heads
    pages = -(-max(contexts) // block_size)
    tables = torch.randperm(len(counts) * pages, dtype=torch.int32).view(len(counts), pages) + 1
    meta = AttentionMetadata(
        torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE),
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE), tables.to(DEVICE), head_dim**-0.5,
        max_query_len=max(counts), max_context_len=131072 if max(counts) == 1 else max(contexts),
        min_query_len=min(counts),
    )  # fmt: skip
    num_bytes = 4 * sum(contexts) * kv_heads * head_dim
    layers = max(4, num_copies(num_bytes, DEVICE))
    sizes = tables.numel() + 1, layers, 2, kv_heads, block_size, head_dim
    cache = torch.empty(sizes, device=DEVICE, dtype=torch.bfloat16).normal_()
    if in_8_bits:
        cache = cache.to(PAGE_DTYPE)
        scales = PageScales.ones(kv_heads, torch.zeros(1, dtype=torch.int64, device=DEVICE))
        meta = dataclasses.replace(meta, kv_scales=(scales,) * layers)
    q = torch.randn(sum(counts), q_heads, head_dim, device=DEVICE).bfloat16()
    out, slots = torch.empty_like(q), torch.zeros(q.shape[0], dtype=torch.int64, device=DEVICE)
    chain = None
    if max(counts) == 1:
        counters = torch.zeros(len(counts) * kv_heads, dtype=torch.int32, device=DEVICE)
        chain = DependentChain(counters, history_is_settled=True)
    attention = dispatch(AttentionSpec(q_heads, meta.scale, q.dtype), meta, cache, slots, chain)
    return measure_us([partial(attention.attend, q, layer, out) for layer in range(layers)], DEVICE)


def time_all(shapes: list[int], named: str, *, in_8_bits: bool) -> None:
    """Time the cases whose names begin with `named`."""
    print_header("Times of a layer", "µs", "GB/s or TFLOP/s")
    cases = [("decode", [1] * rows, [context] * rows) for rows, context in DECODE]
    cases += [("prompt", [length] * rows, [length] * rows) for rows, length in PROMPTS]
    cases += [
        ("chunk of 512 at 4,096", [512], [4096]),
        ("512 beside 63 of decode", [512] + [1] * 63, [512] + [272] * 63),
    ]
    cases = [case for case in cases if case[0].startswith(named)]
    for number, (name, counts, contexts) in itertools.product(shapes, cases):
        heads = SHAPES[number]
        try:
            us = layer_us(heads, counts, contexts, in_8_bits=in_8_bits)
        except Exception as error:
            print(f"| {heads} {name} | {type(error).__name__}: {str(error)[:200]} |", flush=True)
            continue
        bandwidth = (2e-3 if in_8_bits else 4e-3) * sum(contexts) * heads[1] * heads[2] / us
        pairs = sum(n * (c - n) + n * (n + 1) / 2 for n, c in zip(counts, contexts, strict=True))
        speed = (
            f"{bandwidth:.0f} GB/s" if max(counts) == 1 else f"{4e-6 * pairs * heads[0] * heads[2] / us:.0f} TFLOP/s"
        )
        print(f"| {heads} {name} {len(counts)} × {max(contexts)} | {us:.2f} | {speed} |", flush=True)
        torch.cuda.empty_cache()


def main() -> None:
    numbers = lambda text: [int(number) for number in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", action="store_true", help="only the bits")
    parser.add_argument("--times", action="store_true", help="only the times")
    parser.add_argument("--shapes", type=numbers, default=None, help=f"numbers of {SHAPES} (bits: all, times: 0,1)")
    parser.add_argument("--blocks", type=numbers, default=list(BLOCK_SIZES), help="tokens of a page")
    parser.add_argument("--windows", type=numbers, default=[0, 512], help="keys that a query sees; 0: all")
    parser.add_argument("--kv", choices=["auto", "fp8"], default="auto", help="numbers of the pages")
    parser.add_argument("--only", default="", help="what names of timed cases begin with: decode, prompt, chunk, 512")
    arguments = parser.parse_args()
    needs_gpu("attention_bits")
    with torch.inference_mode():
        if arguments.bits or not arguments.times:
            shapes = arguments.shapes or list(range(len(SHAPES)))
            compile_all(shapes, arguments.blocks, arguments.windows, in_8_bits=arguments.kv == "fp8")
            found = Differences()
            compare_all(shapes, arguments.blocks, arguments.windows, found, in_8_bits=arguments.kv == "fp8")
            found.print()
        if arguments.times or not arguments.bits:
            time_all(arguments.shapes or [0, 1], arguments.only, in_8_bits=arguments.kv == "fp8")


if __name__ == "__main__":
    main()
