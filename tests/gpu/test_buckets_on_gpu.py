"""Teacher-forced logits in bfloat16 of every shape that graphs are captured for.

They are at most twice as far from transformers in float32 as transformers in bfloat16.
"""

from __future__ import annotations

import copy
import functools
from typing import NamedTuple

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.request import SamplingParams
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.buckets import Buckets, decode_shape
from photon_grpc.runner.graphs import GraphLaunch
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.step import StepShape
from tests.gpu.test_fused_decoder_on_gpu import FAMILIES, reference
from tests.runner.launched import launch_of, step_of
from tests.runner.served import Served

pytestmark = pytest.mark.gpu
NUM_SEQS, LENGTH, BLOCK_SIZE = 256, 96, 16
BLOCKS_A_ROW = LENGTH // BLOCK_SIZE
#: Lengths of the last context of a row; rows of one step differ.
ENDS = tuple(range(40, LENGTH, 7))


def shapes() -> list[StepShape]:
    """Return every shape that rows of at most LENGTH tokens fill."""
    buckets = Buckets(NUM_SEQS)
    mixed = [shape for shape in buckets.mixed_shapes() if shape.num_tokens <= shape.num_rows * (ENDS[0] - 1)]
    return [*map(decode_shape, buckets.rows), *mixed]


class Loaded(NamedTuple):
    runner: ModelRunner
    launch: GraphLaunch
    decoder: Decoder
    texts: torch.Tensor
    expected: torch.Tensor
    rounded: torch.Tensor


@functools.cache
@torch.inference_mode()
def loaded(family: str) -> Loaded:
    """Return a runner whose cache holds every row's text, and transformers' logits after each of its tokens."""
    directory, model = reference(family)
    served = Served(
        directory,
        device="cuda",
        dtype="bfloat16",
        max_model_len=LENGTH,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_SEQS * BLOCKS_A_ROW),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS),
    )
    texts = torch.randint(0, 512, (NUM_SEQS, LENGTH), generator=torch.Generator().manual_seed(5))
    rounded = copy.deepcopy(model).to("cuda", torch.bfloat16)(texts.cuda()).logits.float().cpu()
    runner = served.assembled.runner
    assert isinstance(runner, ModelRunner) and served.assembled.facts.kernels == "triton, fused"
    launch = launch_of(runner)
    assert isinstance(launch, GraphLaunch)
    made = Loaded(runner, launch, step_of(runner)._decoder, texts, model(texts).logits, rounded)
    for first in range(0, NUM_SEQS, 16):
        compute(made, [(row, 0, LENGTH - 1) for row in range(first, first + 16)])
    return made


def compute(made: Loaded, rows: list[tuple[int, int, int]]) -> None:
    """Compute, row by row, the tokens from the first number to before the second; those before are computed."""
    admissions = []
    for row, first, end in rows:
        blocks = tuple(range(1 + row * BLOCKS_A_ROW, 1 + (row + 1) * BLOCKS_A_ROW))
        ids = tuple(made.texts[row, :end].tolist())
        admissions.append(Admission(row + 1, ids, end, first, (blocks,), SamplingParams(0.0)))
    slots, counts = tuple(row + 1 for row, _, _ in rows), tuple(end - first for _, first, end in rows)
    made.runner.submit(Batch(0, (), (), (), left=slots, admissions=tuple(admissions))).result()
    assert not made.runner.submit(Batch(1, slots, counts, (1,) * len(rows))).result().faults


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: f"{shape.kind}-{shape.num_tokens}-{shape.num_rows}")
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_at_most_twice_as_far_from_float32_as_transformers(family: str, shape: StepShape) -> None:
    made = loaded(family)
    found, rows = [], range(shape.num_rows)
    counts = [shape.num_tokens // len(rows) + (row < shape.num_tokens % len(rows)) for row in rows]
    body = made.launch._body(shape)
    assert body is not None
    ends = [[ENDS[(turn + row) % len(ENDS)] for row in rows] for turn in range(max(1, 16 // shape.num_rows))]
    for turn in ends:
        body[1].fill_(torch.nan)
        compute(made, [(row, end - count, end) for row, end, count in zip(rows, turn, counts, strict=True)])
        found.append(made.decoder.logits(body[1][: shape.num_rows]).cpu())
    at = torch.tensor(rows).repeat(len(ends)), torch.tensor(ends).flatten() - 1
    expected = made.expected[at]
    error, allowed = ((each - expected).norm() / expected.norm() for each in (torch.cat(found), made.rounded[at]))
    assert error < 2 * allowed, (error, allowed)
