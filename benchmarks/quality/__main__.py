"""Compare the embedded model in every weight format, and with the KV cache in 8 bits, with itself in 16 bits.

Compared are divergence, flips, perplexity, drift.

    python -m benchmarks.quality --wheels DIR [--formats int8 int4-g128] [--windows 64] [--save NAME] [-- FLAGS]
    photon-grpc quantize photon_grpc/demo/target --output NEW; python -m benchmarks.quality --formats NEW

Each format is loaded with --quantization, kv-fp8 with --kv-cache-dtype fp8, int8+head and int8+embedding with the head,
or with the head and the embedding in 8 bits, a directory as the embedded model in another form. Each computes held-out
text through `LLM`: the files of the packages that the model has not learnt, whose wheels are downloaded to DIR (6 MB);
without --wheels the held-out files of this interpreter's library. FLAGS are those of serve. KL is that of the
distribution in 16 bits to that of the format, a position at a time. A flip is a position where another id is the most
likely; its margin is the distance, in the reference, between the first id and the second. Drift is the first position
at which greedy outputs differ. The exit code is 1 if a format raises the perplexity by more than its limit.

"Own rounding" is KL between the engine's format and a second implementation in plain torch, which shares no code with
it. Activations of 8 bits amplify the last bit of a sum: with them it is as large between float32 and float64 sums of
that implementation.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.quality import rounding
from benchmarks.quality.compare import DEFECT_MARGIN, Distance, first_differences
from benchmarks.quality.held_out import beginnings, held_out_documents, windows
from benchmarks.quality.rounding import KV_FORMAT, KV_LIMIT, ROUNDINGS
from benchmarks.quality.scored import greedy, logits_of
from benchmarks.saved import add_save_flag, saved
from photon_grpc import LLM, demo
from photon_grpc.config.model_dir import read_model_dir

PROMPT_LENGTH = 64
FORMATS = [*ROUNDINGS, KV_FORMAT]
#: What follows a format and "+": flags of the head, or of the embedding and the head that is tied to it.
BESIDE = {
    "head": {"quantization_head": "int8"},
    "embedding": {"quantization_head": "int8", "quantization_embedding": "int8"},
}
HEAD = (
    "| format | KL mean | p99 | p99.9 | own rounding | flips | at a margin above "
    f"{DEFECT_MARGIN} | largest margin | perplexity | change | limit | drift, median (least) |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


class Texts(NamedTuple):
    """What every format computes."""

    windows: list[list[int]]
    prompts: list[list[int]]
    num_greedy: int


class Computed(NamedTuple):
    """What one format made of them."""

    logits: list[torch.Tensor]
    outputs: list[tuple[int, ...]]


def compute(texts: Texts, flags: dict[str, Any]) -> Computed:
    """Load the embedded model with the flags, and compute all texts."""
    with LLM(max_num_seqs=max(1, len(texts.prompts)), **flags) as llm:
        logits = [logits_of(llm, window) for window in texts.windows]
        return Computed(logits, greedy(llm, texts.prompts, texts.num_greedy) if texts.num_greedy else [])


def distance(texts: Texts, reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> Distance:
    found = Distance()
    for expected, logits, window in zip(reference, other, texts.windows, strict=True):
        found.add(expected, logits, window[1:])
    return found


def own_rounding(name: str, texts: Texts, of_engine: Sequence[torch.Tensor]) -> float:
    """Return the mean divergence between the engine's logits and those of the second implementation, if it has any."""
    form, _, beside = name.partition("+")
    if form not in FORMATS or beside == "head":
        return math.nan
    if form == KV_FORMAT:
        model = rounding.with_eight_bit_keys(demo.TARGET)
    else:
        model = rounding.rounded_model(demo.TARGET, ROUNDINGS[form])
    if beside:
        rounding.round_embedding(model)
    some = texts._replace(windows=texts.windows[:4])
    own = [rounding.logits_of(model, window) for window in some.windows]
    return distance(some, own, of_engine[: len(own)]).mean_divergence


def row(name: str, found: Distance, own: float, positions: Sequence[int]) -> str:
    largest = float(found.flips.max()) if len(found.flips) else 0.0
    drift = f"{statistics.median(positions):.0f} ({min(positions)})" if positions else "–"
    return (
        f"| {name} | {found.mean_divergence:.2e} | {found.divergence_at(0.99):.2e} | {found.divergence_at(0.999):.2e} "
        f"| {own:.0e} | {len(found.flips) / found.num_positions:.2%} | {found.num_defects} | {largest:.2f} "
        f"| {found.perplexity:.4f} | {found.perplexity_ratio - 1:+.2%} | {limit_of(name):.1%} | {drift} |"
    )


def limit_of(name: str) -> float:
    name = name.partition("+")[0]
    if name not in FORMATS:
        form = read_model_dir(name).quantization
        return ROUNDINGS["int4-g128" if form is not None and form.kind == "int4" else "fp8-block"].limit
    return KV_LIMIT if name == KV_FORMAT else ROUNDINGS[name].limit


def flags_of(name: str) -> dict[str, Any]:
    form, _, beside = name.partition("+")
    if form not in FORMATS:
        return {"model": name}
    return {"kv_cache_dtype": "fp8"} if form == KV_FORMAT else {"quantization": form} | BESIDE.get(beside, {})


def measure(args: argparse.Namespace) -> bool:
    """Print a row for every format; return whether all are within their limits."""
    documents = held_out_documents(args.wheels)
    texts = Texts(
        windows(documents, args.length, args.windows),
        beginnings(documents, PROMPT_LENGTH, args.prompts),
        args.greedy,
    )
    flags = keywords(args.flags)
    reference = compute(texts, flags)
    origin = "other people's packages" if args.wheels else "the standard library"
    print(
        f"{sum(map(len, texts.windows)):,} held-out ids of {origin} in windows of {args.length:,}; greedy outputs of "
        f"{args.greedy:,} ids after {len(texts.prompts)} prompts of {PROMPT_LENGTH}; flags {flags or 'none'}. "
        f"Perplexity in 16 bits {distance(texts, reference.logits, reference.logits).perplexity:.4f}.\n\n{HEAD}",
        flush=True,
    )
    are_within = True
    for name in args.formats:
        computed = compute(texts, flags | flags_of(name))
        found = distance(texts, reference.logits, computed.logits)
        own = own_rounding(name, texts, computed.logits)
        print(row(name, found, own, first_differences(reference.outputs, computed.outputs)), flush=True)
        are_within &= found.perplexity_ratio - 1 <= limit_of(name)
    return are_within


def keywords(flags: Sequence[str]) -> dict[str, Any]:
    """Return flags of `serve`, each with a value, as keywords of `LLM`."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return {name[2:].replace("-", "_"): int(value) if value.isdigit() else value for name, value in pairs}


def known(name: str) -> str:
    """Return a format or a directory. Raise ArgumentTypeError for another name."""
    form, _, beside = name.partition("+")
    if not (form in FORMATS and beside in ("", *BESIDE)) and not Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(FORMATS)}, nor a directory")
    return name


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", type=known, default=FORMATS, metavar="FORMAT")
    parser.add_argument("--wheels", type=Path, help="where the held-out packages are, or are downloaded to")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024, help="ids of a window")
    parser.add_argument("--greedy", type=int, default=2000, metavar="IDS", help="of greedy outputs; 0: none")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    with saved(args.save):
        return int(not measure(args))


if __name__ == "__main__":
    sys.exit(main())
