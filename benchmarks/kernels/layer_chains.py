"""Decode layers of public shapes as one CUDA graph at a context of 272.

Fused with the tiles that are chosen, fused with the matrix library for every product, and not fused.

    python -m benchmarks.kernels.layer_chains [--shape 3b qwen3-8b] [--rows 1,8,64] [--save NAME]

Microseconds a layer, over as many layers as the second-level cache cannot hold. The floor is bytes of weights, keys and
values over 4.10 TB/s. The bar for what is above it: 1.25 times what the tuned shape (1b, 8b) nearest in bytes a layer
has above its own in the same run, 1.5 µs more where heads are normalised.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from benchmarks.kernels.timing import measure_us, needs_gpu
from benchmarks.saved import add_save_flag, saved
from benchmarks.shapes import HELD_OUT, OF_OTHER_FORMS, SHAPES, Config, layer_bytes, layer_kv_bytes
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.kernels import AttentionMetadata, select
from photon_grpc.kernels.lang.precompile import Job, launches_collected, run_in_forks
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.layers.context import GroupContext, StepContext
from photon_grpc.layers.epilogues import Epilogue
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.unquantized import Unquantized
from photon_grpc.models import Decoder, build, dummy
from photon_grpc.models.fused import fuse

READ_BYTES_PER_US = 4.10e6
CONTEXT, BLOCK_SIZE, MAX_LEN = 272, 64, 512
#: What can be measured; by default those of one form.
KNOWN = SHAPES | OF_OTHER_FORMS
#: Weights of all layers, and the layers.
CHAIN_BYTES, MAX_LAYERS = 320 << 20, 10
TUNED = ("1b", "8b")
ROWS = (1, 8, 16, 32, 64, 128, 256)


class Library(Unquantized):
    """No kernel of ours multiplies."""

    def tile(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Tile | None:
        return None


class Times(NamedTuple):
    """Microseconds a layer."""

    chosen: float
    library: float
    unfused: float
    floor: float

    @property
    def above(self) -> float:
        return self.chosen - self.floor

    @property
    def behind(self) -> float:
        """Of the better of the two others: 0.02 is 2 % slower."""
        return self.chosen / min(self.library, self.unfused) - 1


def num_layers(shape: Config) -> int:
    """Return the layers of a chain whose weights exceed the second-level cache."""
    return max(4, min(MAX_LAYERS, -(-CHAIN_BYTES // layer_bytes(shape))))


def decoders(shape: Config, num_layers: int) -> tuple[Decoder, Decoder, Decoder]:
    """Return (chosen, library, unfused) over the same random weights."""
    sizes = {"num_hidden_layers": num_layers, "vocab_size": 1024, "tie_word_embeddings": True}
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape | sizes))
        config = read_model_dir(Path(directory))
    unfused = build(
        config, dtype=torch.bfloat16, device="cuda", kernels=select("triton", "cuda"), max_model_len=MAX_LEN
    )
    dummy(unfused)
    chosen = fuse(unfused)
    for leaf in unfused.leaves():
        if isinstance(leaf, Linear):
            leaf.method = Library()
    library = fuse(unfused)
    assert chosen is not None and library is not None
    return chosen, library, unfused


class Steps:
    """Decode steps of a decoder's layers over random pages."""

    def __init__(self, decoder: Decoder, max_rows: int) -> None:
        kept = decoder.kv_groups[0].sections[0].format
        pages = max_rows * -(-CONTEXT // BLOCK_SIZE) + 1
        shape = (pages, len(decoder.layers), 2, kept.heads, BLOCK_SIZE, kept.width)
        self.cache = torch.empty(shape, device="cuda", dtype=decoder.dtype).normal_()
        self.x = torch.empty(max_rows, decoder.norm.weight.shape[0], device="cuda", dtype=decoder.dtype).normal_()

    def context(self, decoder: Decoder, rows: int) -> StepContext:
        pages = -(-CONTEXT // BLOCK_SIZE)
        tables = torch.zeros((rows, MAX_LEN // BLOCK_SIZE), dtype=torch.int32, device="cuda")
        tables[:, :pages] = (torch.arange(rows * pages, device="cuda") + 1).view(rows, pages)
        positions = torch.full((rows,), CONTEXT - 1, device="cuda")
        slots = tables[:, pages - 1].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        meta = AttentionMetadata(
            query_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
            context_len=torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda"),
            block_tables=tables,
            scale=0.0,
            max_query_len=1,
            max_context_len=MAX_LEN,
        )
        return StepContext(positions, tuple(self._contexts(decoder, slots, meta)))

    def _contexts(self, decoder: Decoder, slots: torch.Tensor, meta: AttentionMetadata) -> Iterator[GroupContext]:
        """Yield that of the layers of each place; all groups share the pages here."""
        for number, place in enumerate(decoder.places):
            of_place = replace(meta, scale=place.spec.scale, window=decoder.kv_groups[place.group].window)
            yield decoder.group_context(number, self.cache, slots, of_place, history_is_settled=True)

    def run(self, decoder: Decoder, rows: int, ctx: StepContext) -> None:
        """Run all layers and nothing else."""
        x, residual = self.x[:rows], None
        for layer in decoder.layers:
            x, residual = layer(x, residual, ctx)
        ctx.memo.clear()

    def us(self, decoder: Decoder, rows: int) -> float:
        ctx = self.context(decoder, rows)
        return measure_us([lambda: self.run(decoder, rows, ctx)], torch.device("cuda"), 15) / len(decoder.layers)


def floor_us(shape: Config, rows: int) -> float:
    return (layer_bytes(shape) + layer_kv_bytes(shape, rows * CONTEXT)) / READ_BYTES_PER_US


def compile_all(names: Sequence[str], all_rows: Sequence[int]) -> None:
    """Compile every kernel of the run, side by side."""
    jobs: list[Job] = []
    for name in names:
        made = decoders(KNOWN[name], 1)
        steps = Steps(made[0], max(all_rows))
        with launches_collected() as found:
            for decoder in made:
                for rows in all_rows:
                    steps.run(decoder, rows, steps.context(decoder, rows))
        jobs += found
        torch.cuda.synchronize()
    done = run_in_forks(jobs, num_workers=os.cpu_count() or 1)
    print(f"{done} of {len(jobs)} kernels compiled\n", flush=True)


def measure(name: str, all_rows: Sequence[int]) -> dict[int, Times]:
    shape = KNOWN[name]
    made = decoders(shape, num_layers(shape))
    steps = Steps(made[0], max(all_rows))
    found: dict[int, Times] = {}
    steps.us(made[0], all_rows[0])  # the clocks rise
    for rows in all_rows:
        chosen, library, unfused = (steps.us(decoder, rows) for decoder in made)
        found[rows] = Times(chosen, library, unfused, floor_us(shape, rows))
    return found


def bar_us(name: str, rows: int, tuned: dict[str, dict[int, Times]]) -> float:
    """Return what may be above the floor. Infinite where no tuned shape was measured."""
    shape = KNOWN[name]
    near = min(tuned, key=lambda other: abs(layer_bytes(KNOWN[other]) - layer_bytes(shape)), default=None)
    if near is None:
        return float("inf")
    return 1.25 * tuned[near][rows].above + (1.5 if shape["model_type"] in ("qwen3", "gemma3_text") else 0.0)


def report(name: str, found: dict[int, Times], tuned: dict[str, dict[int, Times]]) -> None:
    print(f"\n## {name}{' (held out)' if name in HELD_OUT else ''}\n")
    print("| rows | chosen µs | library µs | unfused µs | floor µs | above µs | bar µs | behind % |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for rows, times in found.items():
        cells = (*times, times.above, bar_us(name, rows, tuned))
        print(f"| {rows} | " + " | ".join(f"{us:.1f}" for us in cells) + f" | {100 * times.behind:.1f} |", flush=True)


def summary(found: dict[str, dict[int, Times]], tuned: dict[str, dict[int, Times]]) -> None:
    cells = [(name, rows, times) for name, by_rows in found.items() for rows, times in by_rows.items()]
    for title, names in (("tuned on", found.keys() - HELD_OUT), ("held out", found.keys() & HELD_OUT)):
        mine = [cell for cell in cells if cell[0] in names]
        behind = [f"{name} at {rows}: {100 * times.behind:.1f} %" for name, rows, times in mine if times.behind > 0.02]
        high = [
            f"{name} at {rows}: {times.above:.1f} for {bar_us(name, rows, tuned):.1f}"
            for name, rows, times in mine
            if times.above > bar_us(name, rows, tuned)
        ]
        print(f"\n## Shapes {title}: {len(names)}, {len(mine)} cells\n")
        print(f"more than 2 % behind: {len(behind)}. " + "; ".join(behind))
        print(f"\nabove the bar: {len(high)}. " + "; ".join(high), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=[*SHAPES], choices=[*KNOWN])
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    add_save_flag(parser)
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.layer_chains")
    all_rows = [int(rows) for rows in arguments.rows.split(",")]
    names = [*TUNED, *(name for name in arguments.shape if name not in TUNED)]
    found: dict[str, dict[int, Times]] = {}
    with saved(arguments.save), torch.inference_mode():
        compile_all(names, all_rows)
        for name in names:
            found[name] = measure(name, all_rows)
            report(name, found[name], {other: found[other] for other in TUNED if other in found})
        summary(found, {name: found[name] for name in TUNED})


if __name__ == "__main__":
    main()
