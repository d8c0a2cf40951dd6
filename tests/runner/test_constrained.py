"""Constrained outputs of a real model: masks from the engine's matchers, against transformers held to the same
table."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.request import FinishReason
from tests.engine.tables import END, Table, TableGrammars
from tests.runner.models import greedy, model
from tests.runner.served import Served

#: Ids of class 1, then of 2, over and over.
PAIRS = Table(({1: 1}, {2: 0}), frozenset())
#: Three ids of class 3 and no more.
THREE = Table(({3: 1}, {3: 2}, {3: 3}, {}), frozenset({3}))
#: Two ids, then nothing: neither a way on nor an end.
STUCK = Table(({0: 1}, {1: 2}, {}), frozenset())
PROMPTS = ([5, 6, 7, 8, 9], [3] * 17, [1, 2], [40, 41, 42])


def constrained_greedy(reference: torch.nn.Module, prompt: list[int], max_tokens: int, table: Table) -> list[int]:
    ids: list[int] = []
    while len(ids) < max_tokens and END not in ids and not table.is_complete(ids):
        allowed = sorted(table.allowed(ids))
        if not allowed:
            break
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *ids]])).logits[0, -1]
        ids.append(allowed[int(logits[allowed].argmax())])
    return ids


@pytest.mark.parametrize("depth", [0, 1])
def test_outputs_held_to_tables_equal_transformers_held_to_them_and_the_free_one_its_own(depth: int) -> None:
    directory, reference = model("llama")
    # Few blocks, so that some are preempted and their matchers go on where they were.
    served = Served(
        directory,
        cache=CacheConfig(block_size=4, num_blocks=9),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, async_depth=depth),
    )
    tables = (PAIRS, THREE, STUCK)
    grammars = TableGrammars({f"r{number}": table for number, table in enumerate(tables)})
    served.engine.scheduler.live.constraints._grammars = grammars
    handles = [served.add(prompt, 20, stop=(END,)) for prompt in PROMPTS]
    served.run()
    pairs, three, stuck, free = (served.outputs[handle] for handle in handles)
    expected = [constrained_greedy(reference, *each) for each in zip(PROMPTS, (20, 20, 20), tables, strict=False)]
    assert [output.ids for output in (pairs, three, stuck)] == expected
    assert free.ids == greedy(reference, PROMPTS[3], 20)
    assert three.finished is not None and three.finished.reason is FinishReason.CONSTRAINT_COMPLETE
    assert stuck.failed is not None and stuck.failed.fault.reason == "INVALID_CONSTRAINT" and len(stuck.ids) == 2
    assert served.engine.scheduler.num_preemptions > 0
