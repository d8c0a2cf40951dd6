"""Penalties, biases, grammars, minima, filters, seeds and log-probabilities in one batch on a GPU, in float32.

A real engine runs over graphs; ids are those of a CPU, log-probabilities those of transformers' logits in float64.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from photon_grpc import demo
from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.logprobs import NO_LOGPROBS, RECORD, LogprobParams
from photon_grpc.core.request import SamplingParams
from photon_grpc.frontend.constraints.constraint import write_grammar
from tests.runner.served import Output, Served

pytestmark = pytest.mark.gpu
NUM_TOKENS, NUM_BEST, PROMPT_TOKENS = 10, 5, 12
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}
CONSTRAINTS = (
    write_grammar(ConstraintAsk("json_schema", json.dumps(SCHEMA))),
    write_grammar(ConstraintAsk("regex", "[a-z]{2,9}( [a-z]+)*")),
    None,
)
Record = tuple[int, float, int]
each_size = pytest.mark.parametrize("num_rows", [1, 8, 64, 256])


def prompt_of(row: int) -> list[int]:
    rng = random.Random(row)
    return [rng.randrange(256, 1500) for _ in range(PROMPT_TOKENS)]


def sampling_of(row: int) -> SamplingParams:
    """Return parameters: every eighth row plain, every sixteenth greedy, the others with all options."""
    if row % 8 == 7:
        return SamplingParams(0.0 if row % 16 == 7 else 0.8, seed=row)
    return SamplingParams(
        temperature=0.7 + 0.1 * (row % 7),
        top_k=(60, 300, -1)[row % 3],
        top_p=(0.97, 0.9, 0.8, 1.0)[row % 4],
        min_p=(0.0, 0.001, 0.01)[row % 3],
        seed=2**64 - 1 - row,
        repetition_penalty=(1.2, 0.9)[row % 2],
        presence_penalty=0.1 * (row % 5),
        frequency_penalty=0.05 * (row % 7) - 0.1,
        logit_bias=((10, 3.0), (206, -100.0), (300 + row % 100, 1.5)),
    )


def add(served: Served, row: int) -> int:
    is_plain = row % 8 == 7
    return served.add(
        prompt_of(row),
        NUM_TOKENS,
        sampling_of(row),
        min_tokens=0 if is_plain else 4,
        stop=() if is_plain else (206, 95, 15),
        constraint=None if is_plain else CONSTRAINTS[row % 3],
        logprobs=NO_LOGPROBS if row % 16 == 15 else LogprobParams(num_logprobs=NUM_BEST),
    )


@functools.cache
def served(device: str) -> Served:
    made = Served(
        demo.TARGET,
        device=device,
        dtype="float32",
        cache=CacheConfig(block_size=8, num_blocks=1024),
        scheduler=SchedulerConfig(max_num_seqs=256),
    )
    # Grammars are compiled here, so that rows with and without them begin together afterwards.
    run(made, range(3))
    return made


def run(served: Served, rows: Sequence[int]) -> list[Output]:
    outputs = [served.outputs[handle] for handle in [add(served, row) for row in rows]]
    while not all(output.finished or output.failed for output in outputs):
        served.run()
        # A grammar is being compiled.
        time.sleep(0.001)
    assert not any(output.failed for output in outputs)
    return outputs


@functools.cache
def outputs_of(device: str, num_rows: int) -> list[Output]:
    return run(served(device), range(num_rows))


def positions_of(output: Output) -> list[list[Record]]:
    """Return the records of each token: its own, those of the best."""
    records, size = list(RECORD.iter_unpack(output.logprobs)), 1 + NUM_BEST
    return [records[at : at + size] for at in range(0, len(records), size)]


@each_size
def test_rows_sample_what_a_cpu_samples(num_rows: int) -> None:
    found, expected = outputs_of("cuda", num_rows), outputs_of("cpu", 256)[:num_rows]
    same = [mine for mine, theirs in zip(found, expected, strict=True) if mine.ids == theirs.ids]
    # Rounding decides close calls: one row in 64 may be one.
    assert len(same) >= num_rows - num_rows // 64
    for mine, theirs in zip(found, expected, strict=True):
        if mine.ids == theirs.ids:
            assert mine.finished is not None and theirs.finished is not None
            assert mine.finished.reason == theirs.finished.reason
            for here, there in zip(positions_of(mine), positions_of(theirs), strict=True):
                assert [each[1] for each in here] == pytest.approx([each[1] for each in there], abs=1e-4)


@functools.cache
def reference() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(demo.TARGET, dtype=torch.float64).eval()


@each_size
@torch.inference_mode()
def test_logprobs_are_the_log_softmax_in_float64(num_rows: int) -> None:
    """They are of raw logits, before everything that a row asks for."""
    for row, output in enumerate(outputs_of("cuda", num_rows)):
        if row % 16 == 15:
            assert not output.logprobs
            continue
        ids = torch.tensor([prompt_of(row) + output.ids])
        expected = reference()(ids).logits[0, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
        positions = positions_of(output)
        assert len(positions) == len(output.ids)
        for records, logprobs, token in zip(positions, expected, output.ids, strict=True):
            assert records[0][0] == token
            mine = [each[1] for each in records]
            assert mine == pytest.approx(logprobs[[each[0] for each in records]].tolist(), abs=1e-4)
            assert mine[1:] == pytest.approx(logprobs.topk(NUM_BEST).values.tolist(), abs=1e-4)
            for each, _, rank in records:
                above, not_below = (int((logprobs > logprobs[each] + slack).sum()) for slack in (1e-4, -1e-4))
                # Itself is among those that are not below it.
                assert above < rank <= not_below
