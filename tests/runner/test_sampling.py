"""Sampled tokens: the filters equal transformers' warpers, and a token depends on nothing but its own row."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from photon_grpc.config.flags import SchedulerConfig
from photon_grpc.core.batch import NAN_LOGITS, NOTHING_TO_SAMPLE, Admission, Batch
from photon_grpc.core.request import FinishReason, SamplingParams
from photon_grpc.kernels import select
from photon_grpc.kernels.sampling import sample
from photon_grpc.kernels.sampling import sample_filtered as sample_filtered
from photon_grpc.kernels.sampling.sample import INVALID
from photon_grpc.kernels.sampling.topk_topp import reference as cutoff
from photon_grpc.runner.sampler import Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable
from tests.kv_plans import kv_plan
from tests.runner.models import model
from tests.runner.served import Served

CASES = [
    (5, 1.0, 0.0),
    (-1, 0.7, 0.0),
    (-1, 1.0, 0.2),
    (20, 0.8, 0.05),
    (1, 1.0, 0.0),
    (-1, 1e-6, 0.0),
    (1000, 0.999, 0.0),
    (-1, 1.0, 0.0),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), CASES)
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(3)
    scaled = torch.randn(6, 97) * 3
    expected = scaled.clone()
    if top_k > 0:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p > 0:
        expected = MinPLogitsWarper(min_p)(None, expected)
    rows = torch.ones(6)
    cut = cutoff(scaled, (rows * top_k).long(), rows * top_p, rows * min_p)
    assert torch.equal(scaled >= cut[:, None], expected.isfinite())


class Identity:
    """The head of a model whose hidden states are logits."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    def sample(self, hidden: torch.Tensor, metadata: sample.SamplingMetadata) -> torch.Tensor:
        return sample.reference(hidden, metadata)


def sampler_of(
    samplings: list[SamplingParams], vocab_size: int, *, position: int = 0
) -> tuple[Sampler, torch.Tensor, torch.Tensor, SamplingLevel]:
    table = SlotTable(len(samplings) + 1, 64, kv_plan(8), vocab_size, torch.device("cpu"))
    admissions = tuple(Admission(slot, (1,), 1, 0, ((1,),), sampling) for slot, sampling in enumerate(samplings, 1))
    slots = list(range(1, len(samplings) + 1))
    batch = Batch(1, tuple(slots), (1,) * len(slots), (1,) * len(slots), admissions=admissions)
    table.apply(batch)
    sampler = Sampler(Identity(), table, select("torch", "cpu"))
    lengths = torch.full((len(slots),), 1 + position)
    return sampler, torch.tensor(slots), lengths, sampler.level(batch)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.76, 4)])
def test_what_meets_top_p_exactly_is_enough(top_p: float, kept: int) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    cut = cutoff(logits, torch.tensor([-1]), torch.tensor([top_p]), torch.tensor([0.0]))
    assert int((logits >= cut[:, None]).sum()) == kept


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(-1, 1e-50, 0.0), (-1, 1.0, 1.0), (9, 1e-50, 0.0), (9, 0.9, 1.0)]
)
def test_the_likeliest_is_always_kept(top_k: int, top_p: float, min_p: float) -> None:
    """Alone, where a filter leaves no other; the smallest top_p is 0 as float32."""
    torch.manual_seed(8)
    scaled = torch.randn(6, 97) * 3
    cut = cutoff(scaled, torch.full((6,), top_k), torch.full((6,), top_p), torch.full((6,), min_p))
    assert torch.equal(cut, scaled.amax(-1))


def test_every_level_samples_the_same_for_rows_that_ask_for_nothing() -> None:
    torch.manual_seed(11)
    logits = torch.randn(3, 200) * 2
    samplings = [SamplingParams(temperature=0.8, seed=7), SamplingParams(temperature=0.0), SamplingParams(seed=9)]
    tail, slots, _, _ = sampler_of(samplings, 200)
    tail._table.numbers.num_prompt[slots] = 5
    tail._table.numbers.output_index[slots] = torch.tensor([0, 1, 2], dtype=tail._table.numbers.output_index.dtype)
    context_len = torch.tensor([9, 5, 6])
    levels = SamplingLevel.PROCESSED_FILTERED, SamplingLevel.FILTERED, SamplingLevel.PROCESSED, SamplingLevel.PLAIN
    sampled = [tail(logits.clone(), slots, context_len, level).ids for level in levels]
    tail._on_cpu = False
    sampled += [tail(logits.clone(), slots, context_len, level).ids for level in levels]
    assert all(torch.equal(ids, sampled[0]) for ids in sampled)


def test_ids_are_banned_up_to_min_tokens_and_for_their_request_alone() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    table = SlotTable(2, 64, kv_plan(8), 3, torch.device("cpu"))
    sampler = Sampler(Identity(), table, select("torch", "cpu"))
    sampled = []
    for turn, banned in enumerate((1, 2)):
        admission = Admission(
            1, (0,), 1, 0, ((1,),), SamplingParams(temperature=0.0), min_tokens=2, banned_until_min=(banned,)
        )
        table.apply(Batch(turn, (1,), (1,), (1,), admissions=(admission,)))
        # Before the token to sample: the prompt alone, then one and two tokens of the output.
        sampled.append(
            [
                int(sampler(logits.clone(), torch.tensor([1]), torch.tensor([n]), SamplingLevel.PROCESSED).ids[0])
                for n in (1, 2, 3)
            ]
        )
    assert sampled[0] == [2, 2, 1] and sampled[1] == [1, 1, 1]


def test_a_neighbour_s_parameters_never_change_a_token() -> None:
    torch.manual_seed(5)
    logits = torch.randn(4, 300) * 2
    mine = [SamplingParams(temperature=0.9, seed=2**64 - 1 - i) for i in range(3)]
    plain = sampler_of([*mine, SamplingParams(temperature=0.0)], 300)
    mixed = sampler_of([*mine, SamplingParams(temperature=1.3, top_k=3, top_p=0.5, min_p=0.1)], 300)
    assert torch.equal(plain[0](logits.clone(), *plain[1:]).ids[:3], mixed[0](logits.clone(), *mixed[1:]).ids[:3])
    assert plain[0](logits.clone(), *plain[1:]).ids[3] == logits[3].argmax()


def test_noise_changes_with_seed_and_position() -> None:
    logits = torch.zeros(50, 1000)
    samples = [
        tail[0](logits.clone(), *tail[1:]).ids.tolist()
        for tail in (
            sampler_of([SamplingParams(seed=s + shift) for s in range(50)], 1000, position=p)
            for shift, p in ((0, 0), (1000, 0), (0, 1))
        )
    ]
    assert len({tuple(ids) for ids in samples}) == 3 and len(set(samples[0])) > 40


def test_every_bit_of_a_seed_matters() -> None:
    """A seed is a uint64, in a column of int64."""
    logits, seeds = torch.zeros(1, 1000), [3, *(3 + 2**bit for bit in (3, 31, 32, 62, 63)), 2**64 - 1, 2**63 - 1]
    tail = sampler_of([SamplingParams(seed=seed) for seed in seeds], 1000)
    ids = [tail[0](logits.repeat(len(seeds), 1), tail[1], tail[2] + at, tail[3]).ids for at in range(4)]
    assert len(set(map(tuple, torch.stack(ids, dim=1).tolist()))) == len(seeds)


def test_filters_that_keep_one_token_are_greedy() -> None:
    logits = torch.randn(2, 200)
    tail = sampler_of([SamplingParams(top_k=1, seed=1), SamplingParams(top_p=1e-9, seed=2)], 200)
    assert torch.equal(tail[0](logits.clone(), *tail[1:]).ids, logits.argmax(-1))


def test_noise_for_all_and_noise_for_each_row_s_kept_sample_the_same() -> None:
    torch.manual_seed(1)
    scaled = torch.randn(6, 500) * 4
    words = torch.arange(6)
    metadata = sample.SamplingMetadata(words, words + 9, words.float(), words * 2**61, words, words // 2)
    smallest = scaled.sort(-1).values[words, torch.tensor([0, 499, 450, 250, 490, 3])]
    sampled = [each(scaled, smallest, metadata) for each in (sample_filtered.sample_all, sample_filtered.sample_each)]
    assert torch.equal(*sampled) and sampled[0][1] == scaled[1].argmax()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_row_alone(poison: float) -> None:
    logits = torch.randn(3, 50)
    logits[1, 7] = poison
    tail = sampler_of([SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(seed=3)], 50)
    ids = tail[0](logits, *tail[1:]).ids
    assert ids[1] == INVALID and ids[0] >= 0 and ids[2] >= 0


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch() -> None:
    directory, _ = model("llama")
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    samplings = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=11),
        SamplingParams(temperature=1.2, seed=12),
        SamplingParams(top_k=8, min_p=0.01, seed=13),
    ]
    alone = [
        Served(directory).complete([prompt], 20, sampling=sampling)[0]
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    together = Served(directory, scheduler=SchedulerConfig(max_num_batched_tokens=4, async_depth=1))
    handles = [together.add(prompt, 20, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    together.run()
    assert [together.outputs[handle].ids for handle in handles] == alone


def test_outputs_differ_and_the_first_is_that_of_a_single_one() -> None:
    directory, _ = model("llama")
    sampling = SamplingParams(temperature=1.5, seed=4)
    served = Served(directory)
    handle = served.add([1, 2, 3], 10, sampling, num_outputs=4)
    served.run()
    outputs = [tuple(served.outputs[handle + index].ids) for index in range(4)]
    assert len(set(outputs)) == 4
    assert list(outputs[0]) == Served(directory).complete([[1, 2, 3]], 10, sampling=sampling)[0]


def test_below_min_tokens_what_would_end_the_output_is_not_sampled() -> None:
    directory, _ = model("llama")
    free = Served(directory).complete([[7, 7]], 12)[0]
    stop = free[2]
    served = Served(directory)
    handle = served.add([7, 7], 12, stop=(stop,), min_tokens=6)
    plain = served.add([7, 7], 12, stop=(stop,))
    served.run()
    assert stop not in served.outputs[handle].ids[:6] and len(served.outputs[handle].ids) >= 6
    assert served.outputs[plain].ids == free[: free.index(stop) + 1]
    assert served.outputs[plain].finished.reason is FinishReason.STOP_TOKEN


def test_what_is_nearly_greedy_is_greedy() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, 200)
    samplings = [SamplingParams(temperature=9e-6, seed=1), SamplingParams(temperature=0.0), SamplingParams(seed=2)]
    sampler, slots, lengths, level = sampler_of(samplings, 200)
    assert torch.equal(sampler(logits.clone(), slots, lengths, level).ids[:2], logits[:2].argmax(-1))
    assert sampler._table.numbers.temperature[slots].tolist() == [0.0, 0.0, 1.0] and samplings[0].is_greedy


def test_both_ends_of_sampling_call_a_failed_row_by_the_same_number() -> None:
    assert (sample.INVALID, sample.NOTHING) == (NAN_LOGITS, NOTHING_TO_SAMPLE)
