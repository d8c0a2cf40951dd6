"""The padded step of graphs, called instead of captured: equal to the eager step, and padding changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.ports import EnginePorts
from photon_grpc.core.request import SamplingParams
from photon_grpc.kernels import select
from photon_grpc.models import Decoder, build, load
from photon_grpc.runner import graphs
from photon_grpc.runner.buckets import DECODE_BUCKETS, Buckets, decode_buckets, decode_shape, mixed_buckets
from photon_grpc.runner.build import eager_runner
from photon_grpc.runner.drafting import NgramDrafter
from photon_grpc.runner.eager import EagerLaunch
from photon_grpc.runner.graphs import GraphLaunch, Replay, Tensors
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Step, StepShape
from tests.runner.models import WINDOWED, greedy, model
from tests.runner.served import Served
from tests.runner.test_greedy import prompts

BLOCK_SIZE = 8


def plain_call(function: Callable[[], Tensors], before: Callable[[], Any] | None = None) -> Replay[Tensors]:
    """Call both functions instead of capturing the first; every replay calls that again."""
    if before is not None:
        before()
    out = function()

    def replay() -> None:
        for mine, new in zip(tensors_of(out), tensors_of(function()), strict=True):
            mine.copy_(new)

    return replay, out


def tensors_of(out: object) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else [each for each in out if each is not None]  # type: ignore[attr-defined]


class Replayed(Served):
    """A service whose runner replays every batch that fits a bucket."""

    def __init__(self, num_seqs: int = 8, budget: int = 64, family: str = "llama", drafts: int = 0) -> None:
        directory, _ = model(family)
        super().__init__(
            directory,
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=100),
            scheduler=SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget),
            speculation="ngram" if drafts else "",
            num_drafts=drafts or None,
        )
        self.runner, self.launch, self.cache = replayed_runner(num_seqs, family, drafts)
        object.__setattr__(self.assembled, "runner", self.runner)
        self.engine = self.assembled.engine(EnginePorts(self.post, self.post, NoHeartbeat()))


@functools.cache
def loaded(family: str = "llama") -> Decoder:
    card = read_model_dir(model(family)[0])
    decoder = build(
        card, dtype=torch.float32, device=torch.device("cpu"), kernels=select("torch", "cpu"), max_model_len=256
    )
    load(decoder, card)
    return decoder


def new_cache(family: str = "llama") -> KVCache:
    """Return a cache filled so that reads of unwritten memory show."""
    cache = KVCache(KVPlan(loaded(family).kv_groups, BLOCK_SIZE), 100, torch.device("cpu"))
    cache.pages[0].fill_(float("nan"))
    return cache


def replayed_runner(num_seqs: int, family: str = "llama", drafts: int = 0) -> tuple[ModelRunner, GraphLaunch, KVCache]:
    decoder, device, kernels, cache = loaded(family), torch.device("cpu"), select("torch", "cpu"), new_cache(family)
    table = SlotTable(num_seqs + 1, decoder.max_model_len, cache.plan, decoder.vocab_size, device, drafts)
    buckets = Buckets(num_seqs, drafts)
    step = Step(decoder, table, cache.pages, kernels, max(num_seqs, *buckets.draws))
    launch = GraphLaunch(step, EagerLaunch(step), buckets, torch.inference_mode()(plain_call), step)
    drafter = NgramDrafter(drafts, table, kernels) if drafts else None
    return ModelRunner(launch, table, cache, depth=0, drafter=drafter), launch, cache


@pytest.mark.parametrize("family", ["llama", WINDOWED])
def test_replayed_output_equals_transformers(family: str) -> None:
    _, reference = model(family)
    asked = prompts(8)
    served = Replayed(family=family)
    assert served.complete(asked, 24) == [greedy(reference, prompt, 24) for prompt in asked]
    assert {shape.kind for shape in served.launch.bodies} == {"decode", "mixed"}


@pytest.mark.parametrize("drafts", [1, 7])
def test_replayed_output_with_drafts_is_that_without(drafts: int) -> None:
    samplings = [
        SamplingParams(0.0),
        SamplingParams(0.6, seed=3),
        SamplingParams(0.0, repetition_penalty=0.6, frequency_penalty=-1.0),
        SamplingParams(0.7, top_p=0.8, seed=5, presence_penalty=-1.5),
        SamplingParams(0.0, logit_bias=((7, 60.0), (9, 60.0))),
    ]
    outputs, replayed = [], Replayed(drafts=drafts)
    for served in (replayed, Served(model("llama")[0])):
        handles = [
            served.add(prompt, 20, sampling, min_tokens=7, stop=(9, 11))
            for prompt, sampling in zip(prompts(5), samplings, strict=True)
        ]
        served.run()
        outputs.append([(served.outputs[handle].ids, served.outputs[handle].finished.reason) for handle in handles])
    assert outputs[0] == outputs[1]
    widths = {shape.num_draws // shape.num_rows for shape in replayed.launch.bodies if shape.kind == "verify"}
    # A step is as wide as its drafts, of which there are fewer near the end of an output.
    assert max(widths) == drafts + 1 and widths <= {2, 4, 6, 8}
    # Verify steps sample at more positions than there are rows; no decode step has so many.
    assert max(shape.num_rows for shape in replayed.launch.bodies if shape.kind == "decode") <= 8


def test_a_prompt_alone_is_replayed_in_a_shape_of_one_row() -> None:
    _, reference = model("llama")
    served = Replayed()
    for length in (2, 5, 31, 32, 33, 70):
        prompt = [7 + (3 * token + length) % 90 for token in range(length)]
        assert served.complete([prompt], 3) == [greedy(reference, prompt, 3)]
    assert {shape.num_tokens for shape in served.launch.bodies if shape.num_rows == 1} == {1, 32, 64}


def test_long_chunks_beside_many_rows_are_replayed_too() -> None:
    _, reference = model("llama")
    asked = prompts(9, tuple(range(5, 28)))
    served = Replayed(num_seqs=24, budget=200)
    assert served.complete(asked, 8) == [greedy(reference, prompt, 8) for prompt in asked]
    assert any(shape.num_rows == 64 and shape.kind == "mixed" for shape in served.launch.bodies)


def test_sampled_ids_are_those_of_the_eager_step() -> None:
    samplings = [
        SamplingParams(0.0),
        SamplingParams(0.9, seed=3),
        SamplingParams(1.1, top_k=9, seed=4),
        SamplingParams(0.7, top_p=0.8, seed=5),
        SamplingParams(0.0),
    ]
    outputs = []
    for served in (Replayed(), Served(model("llama")[0])):
        handles = [served.add(prompt, 12, sampling) for prompt, sampling in zip(prompts(5), samplings, strict=True)]
        served.run()
        outputs.append([served.outputs[handle].ids for handle in handles])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("num_rows", [1, 5, 7, 11, 15])
def test_surplus_rows_change_nothing_but_block_0(num_rows: int) -> None:
    runner, launch, cache = replayed_runner(16)
    admissions = tuple(
        Admission(slot, (slot, 5, 9), 3, 0, ((slot,),), SamplingParams(0.0)) for slot in range(1, num_rows + 1)
    )
    slots, ones = tuple(range(1, num_rows + 1)), (1,) * num_rows
    runner.submit(Batch(1, slots, (3,) * num_rows, ones, admissions=admissions))
    before = cache.pages[0].clone()
    output = runner.submit(Batch(2, slots, ones, ones)).result()
    bucket = next(b for b in DECODE_BUCKETS if b >= num_rows)
    assert decode_shape(bucket) in launch.bodies and (bucket > num_rows or num_rows == 1)
    assert len(output.ids) == num_rows and not output.faults
    changed = (cache.pages[0].nan_to_num(7.0) != before.nan_to_num(7.0)).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {0, *slots}
    # Of every row exactly the fourth place was written.
    written = cache.pages[0][list(slots)].isfinite().flatten(0, 3)[..., 0].view(num_rows, -1, BLOCK_SIZE)
    assert written[:, :, :4].all() and not written[:, :, 4:].any()


@pytest.mark.parametrize("num_rows", [2, 16])
def test_surplus_tokens_of_a_mixed_step_change_nothing_but_block_0(num_rows: int) -> None:
    """Also where no row is padding, and the last one stands before the surplus tokens."""
    runner, launch, cache = replayed_runner(16)
    admissions = tuple(
        Admission(slot, (slot, 5, 9) * (length // 3), length, 0, ((2 * slot, 2 * slot + 1),), SamplingParams(0.0))
        for slot, length in enumerate((3,) * (num_rows - 1) + (9,), 1)
    )
    decoding, ones = tuple(range(1, num_rows)), (1,) * (num_rows - 1)
    runner.submit(Batch(1, decoding, tuple(3 * one for one in ones), ones, admissions=admissions[:-1]))
    before = cache.pages[0].clone()
    # All but the end of a prompt, then the rows that decode: 9 and 23 tokens of 32.
    batch = Batch(2, (num_rows, *decoding), (8, *ones), (0, *ones), admissions=admissions[-1:])
    output = runner.submit(batch).result()
    assert StepShape("mixed", 32, 16) in launch.bodies and not output.faults
    assert runner.table.numbers.num_computed.tolist() == [0, *(4 for _ in decoding), 8] + [0] * (16 - num_rows)
    is_old = before.isfinite()
    assert torch.equal(cache.pages[0][1:][is_old[1:]], before[1:][is_old[1:]])
    written = (cache.pages[0].isfinite() & ~is_old).flatten(1, 3)[..., 0].any(1)
    assert written[1:].nonzero().tolist() == [
        *([2 * slot - 1, 3] for slot in decoding),
        *([2 * num_rows - 1, i] for i in range(8)),
    ]


def admission(slot: int, ids: tuple[int, ...], num_prompt: int | None = None) -> Admission:
    return Admission(slot, ids, num_prompt or len(ids), 0, ((2 * slot - 1, 2 * slot),), SamplingParams(0.0))


def same_as_eager(runner: ModelRunner, batches: list[Batch]) -> None:
    """Check that each batch gives the ids of an eager runner and leaves the same state."""
    cache = KVCache(KVPlan(loaded().kv_groups, BLOCK_SIZE), 100, torch.device("cpu"))
    eager = eager_runner(loaded(), cache, max_num_seqs=runner.table.numbers.num_computed.shape[0] - 1)
    for batch in batches:
        mine, theirs = (each.submit(batch).result() for each in (runner, eager))
        assert (mine.ids, mine.faults) == (theirs.ids, {})
    assert torch.equal(runner.table.numbers.num_computed, eager.table.numbers.num_computed)
    assert torch.equal(runner.table.token_ids[1:], eager.table.token_ids[1:])


def test_slots_are_sent_again_behind_a_mixed_step() -> None:
    runner, launch, _ = replayed_runner(8)
    first, second, third = (admission(slot, (slot, 5, 9)) for slot in (1, 2, 3))
    decode = Batch(0, (1, 2), (1, 1), (1, 1))
    same_as_eager(
        runner,
        [
            Batch(0, (1, 2), (3, 3), (1, 1), admissions=(first, second)),
            decode,
            Batch(0, (2, 3), (1, 3), (1, 1), admissions=(third,)),
            decode,
            Batch(0, (3, 1), (1, 1), (1, 1)),
        ],
    )
    assert set(launch.bodies) == {StepShape("mixed", 32, 16), decode_shape(16), decode_shape(2)}


def test_slots_are_sent_again_behind_a_capture_that_failed() -> None:
    runner, launch, _ = replayed_runner(8)
    both, one = Batch(0, (1, 2), (1, 1), (1, 1)), Batch(0, (2,), (1,), (1,))
    admissions = tuple(admission(slot, (slot, 5, 9)) for slot in (1, 2))
    capture = launch._capture

    def refuse_decode_steps_of_one(function: Callable[[], torch.Tensor], before: object = None) -> Replay:
        replay, ids = capture(function)
        if len(ids) == 1:
            raise torch.OutOfMemoryError("no memory for a graph")
        return replay, ids

    launch._capture = refuse_decode_steps_of_one
    same_as_eager(runner, [Batch(0, (1, 2), (3, 3), (1, 1), admissions=admissions), both, one, both])
    assert launch.bodies[decode_shape(1)] is None and launch.bodies[decode_shape(2)]


@torch.inference_mode()
def test_slots_are_sent_again_behind_a_step_that_could_not_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, launch, _ = replayed_runner(8)
    admissions = tuple(admission(slot, (slot, 5, 9)) for slot in (1, 2, 3))
    both, other = Batch(0, (1, 2), (1, 1), (1, 1)), Batch(0, (3, 2), (1, 1), (1, 1))
    same_as_eager(runner, [Batch(0, (1, 2, 3), (3, 3, 3), (1, 1, 1), admissions=admissions), both])
    table = runner.table
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(graphs, "fill_columns", lambda *_: 1 / 0)
        launch(other)()
    before = table.numbers.num_computed.clone()
    launch(other)()
    assert (table.numbers.num_computed - before).tolist()[:4] == [0, 0, 1, 1]


def test_a_prompt_of_one_token_and_a_chunk_of_one_are_no_decode_steps() -> None:
    runner, launch, _ = replayed_runner(8)
    chunk = Batch(0, (2,), (1,), (0,))
    same_as_eager(
        runner,
        [
            Batch(0, (1, 2), (1, 1), (1, 0), admissions=(admission(1, (7,)), admission(2, (3, 4, 5, 6)))),
            chunk,
            Batch(0, (1, 2), (1, 1), (1, 0)),
            Batch(0, (2,), (1,), (1,)),
        ],
    )
    assert set(launch.bodies) == {StepShape("mixed", 32, 16), decode_shape(16), decode_shape(1)}
    # One that is admitted may need a key that another row of its step writes.
    runner.submit(Batch(0, (1, 3), (1, 1), (1, 1), admissions=(admission(3, (8,)),)))
    assert decode_shape(2) not in launch.bodies


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "shape"),
    [
        (1, 1, (32, 16)),
        (1, 2, (32, 1)),
        (1, 33, (64, 1)),
        (1, 2048, (2048, 1)),
        (2, 33, (64, 16)),
        (16, 20, (32, 16)),
        (17, 20, (96, 64)),
        (16, 512, (512, 16)),
        (16, 513, (640, 64)),
        (64, 65, (96, 64)),
        (65, 66, (256, 96)),
        (96, 2048, (2048, 96)),
        (96, 2049, None),
        (97, 200, None),
    ],
)
def test_the_smallest_shape_that_holds_the_batch_is_taken(
    num_rows: int, num_tokens: int, shape: tuple[int, int] | None
) -> None:
    _, launch, _ = replayed_runner(80)
    counts = (num_tokens - num_rows + 1, *(1,) * (num_rows - 1))
    # The first does not yield: no decode step.
    found = launch._buckets.shape(Batch(0, tuple(range(1, num_rows + 1)), counts, (0, *(1,) * (num_rows - 1))))
    assert found == (shape and StepShape("mixed", *shape))


def test_what_cannot_be_captured_is_computed_eagerly() -> None:
    _, reference = model("llama")
    served = Replayed()

    def refuse(*functions: object) -> None:
        raise torch.OutOfMemoryError("no memory for a graph")

    served.launch._capture = refuse  # type: ignore[assignment]
    asked = prompts(8)
    assert served.complete(asked, 6) == [greedy(reference, prompt, 6) for prompt in asked]
    assert set(served.launch.bodies.values()) == {None}


@pytest.mark.parametrize("max_num_seqs", [1, 8, 16, 17, 64, 65, 256, 512, 600])
def test_mixed_buckets_hold_every_row_and_are_no_decode_steps(max_num_seqs: int) -> None:
    by_rows = mixed_buckets(max_num_seqs)
    assert max(by_rows) >= min(max_num_seqs, DECODE_BUCKETS[-1])
    assert list(by_rows) == sorted(by_rows)
    for rows, buckets in by_rows.items():
        assert list(buckets) == sorted(buckets) and rows < buckets[0]
    assert by_rows[max(by_rows)][-1] == 2048


def test_buckets_cover_what_may_come() -> None:
    assert decode_buckets(1) == (1,) and decode_buckets(9)[-1] == 12 and decode_buckets(512)[-1] == 512


def test_a_start_survives_bodies_that_cannot_be_captured() -> None:
    """One bucket of rows, or all of them: their batches run eagerly."""
    for refused in ({8}, set(range(600))):
        runner, launch, _ = replayed_runner(8)
        capture, reported = launch._capture, []
        one_row = Admission(1, (1, 2, 3), 3, 0, ((1,),), SamplingParams(0.0))

        def refuse(function, before=None, capture=capture, refused=refused):  # type: ignore[no-untyped-def]
            replay, out = capture(function)
            if isinstance(out, torch.Tensor) and out.shape[0] in refused:
                raise torch.OutOfMemoryError("no room")
            return replay, out

        launch._capture = refuse
        with torch.inference_mode():
            launch.warm_up(lambda done, total, reported=reported: reported.append((done, total)))
        assert reported[-1][0] == reported[-1][1]
        assert not runner.submit(Batch(1, (1,), (3,), (1,), admissions=(one_row,))).result().faults
