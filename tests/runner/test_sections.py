"""Another model's keys in a section of the same blocks: whatever becomes of a sequence's keys becomes of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.core.kv import KVGroup, KVPlan, PageFormat, Section, attached
from photon_grpc.core.ports import EnginePorts
from photon_grpc.kernels import select
from photon_grpc.kernels.slot_state import Inputs
from photon_grpc.layers.context import StepContext
from photon_grpc.models import Decoder, build, load
from photon_grpc.runner.eager import EagerLaunch
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Bounds, Rows, Step
from tests.examples import examples
from tests.runner.models import WINDOWED, greedy, model
from tests.runner.served import Served
from tests.runner.test_greedy import ASKED, COMMON, NUM_GROUPS, expected, prompts

CPU = torch.device("cpu")
#: One number of 8 bits a token and plane: the token's id in two parts.
MARKS = KVGroup((Section(PageFormat(1, 1, "float8_e4m3fn"), (0,)),))


@functools.cache
def loaded(family: str) -> Decoder:
    card = read_model_dir(model(family)[0])
    decoder = build(card, dtype=torch.float32, device=CPU, kernels=select("torch", CPU), max_model_len=512)
    load(decoder, card)
    return decoder


class Marking(Step):
    """A step that keeps the id of every token in the draft model's section, and checks those before it."""

    marks: torch.Tensor
    num_checked = 0

    def _context(self, found: Inputs, rows: Rows, bounds: Bounds, **more: Any) -> StepContext:
        size, slots = self.table.block_size, found.slot_mapping[0]
        marks = torch.stack((found.token // 256, found.token % 256), 1).to(torch.uint8)
        self.marks[slots // size, 0, :, 0, slots % size, 0] = marks
        for row, length in enumerate(rows.context_len.tolist()):
            at = torch.arange(length)
            seen = self.marks[found.block_tables[0][row, at // size].long(), 0, :, 0, at % size, 0].long()
            ids = self.table.token_ids[rows.slots[row], :length]
            assert torch.equal(256 * seen[:, 0] + seen[:, 1], ids.long())
            self.num_checked += length
        return super()._context(found, rows, bounds, **more)


class Marked(Served):
    """A served model with a draft model's section on its blocks."""

    def __init__(self, family: str, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
        super().__init__(model(family)[0], cache=cache, scheduler=scheduler)
        decoder, old = loaded(family), self.assembled.runner
        plan = KVPlan(attached(decoder.kv_groups, (MARKS,)), old.kv.block_size, old.kv.max_chunk)
        pages = KVCache(plan, old.num_blocks, CPU)
        assert [each.shape[1] for each in pages.pages] == [len(decoder.kv_groups[0].layers), 1]
        num_seqs = self.assembled.sizes.max_num_seqs
        table = SlotTable(num_seqs + 1, decoder.max_model_len, plan, decoder.vocab_size, CPU)
        self.marking = Marking(decoder, table, pages.pages, decoder.kernels, num_seqs)
        self.marking.marks = pages.pages[1].view(torch.uint8)
        runner = ModelRunner(EagerLaunch(self.marking), table, pages, depth=old.depth)
        object.__setattr__(self.assembled, "runner", runner)
        self.engine = self.assembled.engine(EnginePorts(self.post, self.post, NoHeartbeat()))


@given(
    family=st.sampled_from(["llama", WINDOWED]),
    block_size=st.sampled_from([4, 8]),
    scale=st.integers(2, 6),
    contiguous=st.booleans(),
    caches=st.booleans(),
    scheduler=st.builds(
        SchedulerConfig,
        max_num_seqs=st.integers(2, 9),
        max_num_batched_tokens=st.integers(1, 60),
        async_depth=st.integers(0, 1),
    ),
)
@settings(max_examples=examples(12))
def test_a_draft_models_keys_are_where_the_models_are_whatever_happens(
    family: str, block_size: int, scale: int, contiguous: bool, caches: bool, scheduler: SchedulerConfig
) -> None:
    """Whatever happens: chunks, prefix hits, forks with copies of partial blocks, preemption, windows, runs."""
    layout = "contiguous" if contiguous and family != WINDOWED else "paged"
    num_blocks = NUM_GROUPS[family] * 16 * scale // block_size * 2
    cache = CacheConfig(block_size, num_blocks, layout, enable_prefix_caching=caches)
    served = Marked(family, cache, scheduler)
    forked = served.add([*COMMON, 7], 12, num_outputs=2)
    assert served.complete(ASKED, 12) == expected(family)
    assert served.complete(ASKED, 12) == expected(family)
    assert served.outputs[forked].ids == served.outputs[forked + 1].ids and served.marking.num_checked > 0


def test_a_draft_models_keys_are_computed_again_with_the_models() -> None:
    served = Marked("llama", CacheConfig(4, 15), SchedulerConfig(max_num_seqs=8))
    assert served.complete(ASKED, 12) == expected("llama")
    assert served.engine.scheduler.num_preemptions > 0


def test_a_draft_models_keys_are_computed_again_with_those_behind_windows() -> None:
    _, reference = model(WINDOWED)
    asked = prompts(3, (6, 3, 9, 1, 7, 5))
    served = Marked(WINDOWED, CacheConfig(4, 39), SchedulerConfig(max_num_seqs=8))
    assert served.complete(asked, 36) == [greedy(reference, prompt, 36) for prompt in asked]
    assert served.engine.scheduler.num_preemptions > 0
