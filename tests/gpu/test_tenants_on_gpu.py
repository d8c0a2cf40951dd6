"""Slots that change their tenants on a GPU, in float32: earlier tenants change nothing, in graphs or without."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given

from photon_grpc import LLM
from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from tests.properties.drawn_requests import complete, drawn_requests, together, unshrunk
from tests.runner.models import model
from tests.runner.served import Served
from tests.runner.tenants import BLOCK_SIZE, NUM_SEQS, TENANTS, outputs_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_garbage_in_every_field_of_a_slot_changes_nothing_once_it_is_admitted_to(eager: bool) -> None:
    served = Served(
        model("llama")[0],
        device="cuda",
        eager=eager,
        dtype="float32",
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=100),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS),
    )
    runner = served.assembled.runner
    with torch.inference_mode():
        for kind in TENANTS:
            expected = outputs_of(runner, kind, None)
            for seed in range(4):
                assert outputs_of(runner, kind, random.Random(seed)) == expected


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    flags = {"dtype": "float32", "max_num_seqs": 3, "num_blocks": 64, "enable_prefix_caching": False}
    with LLM(device="cuda", enforce_eager=True, **flags) as llm:
        yield llm


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def crowded(request: pytest.FixtureRequest) -> Iterator[LLM]:
    flags = {"dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 8, "num_blocks": 48}
    with LLM(device="cuda", enforce_eager=request.param, **flags) as llm:
        yield llm


@given(drawn_requests)
@unshrunk
def test_nothing_of_a_request_reaches_the_next_in_its_slot_or_its_neighbours(alone: LLM, crowded: LLM, many) -> None:  # type: ignore[no-untyped-def]
    assert together(crowded, many) == [complete(alone, one) for one in many]
