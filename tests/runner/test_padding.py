"""Every captured shape, filled short by one row and one token: padding and free slots change nothing."""

from __future__ import annotations

import functools

import pytest
import torch

from photon_grpc.core.kv import KVPlan
from photon_grpc.runner.build import eager_runner, graph_runner
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.step import StepShape
from tests.runner.padding import LEVELS, MAX_MODEL_LEN, NUM_SEQS, SPECULATION, check, shapes
from tests.runner.test_graphs import loaded, plain_call


@functools.cache
def runners() -> tuple[ModelRunner, ModelRunner]:
    decoder, device = loaded(), torch.device("cpu")
    caches = [KVCache(KVPlan(decoder.kv_groups, 8), NUM_SEQS * MAX_MODEL_LEN // 8, device) for _ in range(2)]
    with torch.inference_mode():
        replayed = graph_runner(
            decoder,
            caches[0],
            max_num_seqs=NUM_SEQS,
            depth=0,
            progress=lambda done, total: None,
            capture=torch.inference_mode()(plain_call),
            speculation=SPECULATION,
        )
    return replayed, eager_runner(decoder, caches[1], max_num_seqs=NUM_SEQS, speculation=SPECULATION)


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: f"{shape.kind}-{shape.num_tokens}-{shape.num_rows}")
@torch.inference_mode()
def test_padding_and_free_slots_change_nothing(shape: StepShape) -> None:
    replayed, eager = runners()
    for level in LEVELS if shape.kind == "decode" else LEVELS[shape.num_tokens // 32 % 3 :][:1]:
        check(replayed, eager, shape, level)
    assert shape in replayed.launch_body.bodies  # type: ignore[attr-defined]
