"""A whole decode step without sampling: embedding, layers, head, as one CUDA graph at a context of 272, random weights.

    python -m benchmarks.kernels.fused_step [1b] [8b] [--rows 1,8,64] [--save NAME]

Milliseconds a step: the decoder fused, the same decoder as it is, and the floor: bytes of the weights and of the keys
and values over the bandwidth of a streaming read. Then the same step with greedy sampling, replayed again and again as
one graph, and as two, body | tail: what a batch pays whose tail has to wait for masks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.kernels.timing import captured, measure_us, needs_gpu
from benchmarks.saved import add_save_flag, saved
from benchmarks.shapes import SHAPES
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.kernels import AttentionMetadata, select
from photon_grpc.kernels.sampling.sample import SamplingMetadata
from photon_grpc.layers.context import StepContext
from photon_grpc.models import Decoder, build, dummy
from photon_grpc.models.fused import fuse

READ_BYTES_PER_SECOND = 4.5e12
CONTEXT, BLOCK_SIZE, MAX_LEN = 272, 64, 4096
COLUMNS = (
    "plain ms", "its layers ms", "fused ms", "fused layers ms", "floor ms", "sampled in graph ms", "body and tail ms",
)  # fmt: skip


def model(name: str) -> Decoder:
    """Return a model with random weights on the GPU."""
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[name]))
        config = read_model_dir(Path(directory))
    decoder = build(
        config, dtype=torch.bfloat16, device="cuda", kernels=select("triton", "cuda"), max_model_len=MAX_LEN
    )
    dummy(decoder)
    return decoder


def step_context(decoder: Decoder, rows: int, cache: torch.Tensor) -> StepContext:
    pages = -(-CONTEXT // BLOCK_SIZE)
    tables = torch.zeros((rows, MAX_LEN // BLOCK_SIZE), dtype=torch.int32, device="cuda")
    tables[:, :pages] = (torch.randperm(rows * pages, device="cuda") + 1).view(rows, pages)
    positions = torch.full((rows,), CONTEXT - 1, device="cuda")
    slots = tables[:, pages - 1].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    meta = AttentionMetadata(
        query_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        context_len=torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda"),
        block_tables=tables,
        scale=decoder.places[0].spec.scale,
        max_query_len=1,
        max_context_len=MAX_LEN,
    )
    return StepContext(positions, (decoder.group_context(0, cache, slots, meta, history_is_settled=True),))


def floor_us(decoder: Decoder, rows: int) -> float:
    kept = decoder.kv_groups[0].sections[0].format
    keys = rows * CONTEXT * len(decoder.layers) * 2 * kept.heads * kept.width
    rest = 0 if decoder.head.is_tied else decoder.embedding.weight.numel()
    return (decoder.num_parameters - rest + keys) * 2 / READ_BYTES_PER_SECOND * 1e6


def step_ms(decoder: Decoder, ids: torch.Tensor, ctx: StepContext, with_head: bool) -> float:
    def call() -> torch.Tensor:
        hidden = decoder.forward(ids, ctx)
        return decoder.logits(hidden) if with_head else hidden

    return measure_us([call], ids.device, repeats=15) / 1e3


def replayed_ms(parts: list[Callable[[], object]], repeats: int = 60) -> float:
    """Return the milliseconds of a graph each, replayed in turn without waiting."""
    graphs = [captured([part]) for part in parts]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(repeats + 3):
        if number == 3:
            begin.record()
        for graph in graphs:
            graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def split_ms(decoder: Decoder, ids: torch.Tensor, ctx: StepContext) -> tuple[float, float]:
    """Return milliseconds of one graph, and of body and tail in one graph each."""
    row = torch.arange(ids.shape[0], device=ids.device)
    metadata = SamplingMetadata(row, row, torch.zeros(row.shape, device=ids.device), row, row, row)
    hidden = decoder.forward(ids, ctx).clone()

    def body() -> None:
        hidden.copy_(decoder.forward(ids, ctx))

    def tail() -> None:
        decoder.sample(hidden, metadata)

    def both() -> None:
        decoder.sample(decoder.forward(ids, ctx), metadata)

    return replayed_ms([both]), replayed_ms([body, tail])


def measure(name: str, all_rows: list[int]) -> None:
    decoder = model(name)
    fused = fuse(decoder)
    assert fused is not None
    kept = decoder.kv_groups[0].sections[0].format
    pages = max(all_rows) * -(-CONTEXT // BLOCK_SIZE) + 1
    cache = torch.randn(pages, len(decoder.layers), 2, kept.heads, BLOCK_SIZE, kept.width, device="cuda").bfloat16()
    for rows in all_rows:
        ctx = step_context(fused, rows, cache)
        ids = torch.randint(0, decoder.vocab_size, (rows,), device="cuda")

        steps = [(decoder, step_context(decoder, rows, cache)), (fused, ctx)]
        results = [step_ms(each, ids, given, head) for each, given in steps for head in (True, False)]
        cells = (*results, floor_us(decoder, rows) / 1e3, *split_ms(fused, ids, ctx))
        print(f"| {name} | {rows} | {' | '.join(f'{ms:.3f}' for ms in cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["1b", "8b"])
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    add_save_flag(parser)
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.fused_step")
    with saved(arguments.save), torch.inference_mode():
        print(f"| model | rows | {' | '.join(COLUMNS)} |\n|---|--:|{'--:|' * len(COLUMNS)}", flush=True)
        for name in arguments.models:
            measure(name, [int(rows) for rows in arguments.rows.split(",")])


if __name__ == "__main__":
    main()
