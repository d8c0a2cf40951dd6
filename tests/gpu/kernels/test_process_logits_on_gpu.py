"""Penalties, biases, bans, limits and masks at real vocabularies on a GPU.

They are compared with the formula in float64 over lists of ids, and with numpy's bits.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from photon_grpc.kernels.sampling import penalties, process_logits, sample
from photon_grpc.kernels.sampling.bitmask import Constraints
from photon_grpc.kernels.sampling.penalties import MAX_BIASES, Penalties
from photon_grpc.kernels.sampling.process_logits import LogitsProcessing

pytestmark = pytest.mark.gpu
each_size = pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
each_vocabulary = pytest.mark.parametrize("num_columns", [320, 32000, 128256, 151936])


@dataclass
class Context:
    """A sequence's ids, and what it asks for."""

    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    biases: dict[int, float] = field(default_factory=dict)

    def shape(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [V] by the formula, in float64."""
        x = logits.double()
        if self.biases:
            ids, biases = torch.tensor([*self.biases]), torch.tensor([*self.biases.values()], dtype=torch.float64)
            x[ids.to(x.device)] += biases.to(x.device)
        seen = torch.tensor(sorted({*self.prompt, *self.output}), dtype=torch.int64, device=x.device)
        x[seen] = torch.where(x[seen] > 0, x[seen] / self.repetition, x[seen] * self.repetition)
        counts = Counter(self.output)
        drawn = torch.tensor([*counts], dtype=torch.int64, device=x.device)
        often = torch.tensor([*counts.values()], dtype=torch.float64, device=x.device)
        x[drawn] -= self.frequency * often + self.presence
        return x


def contexts(num_columns: int) -> list[Context]:
    """Return contexts: slot 0 asks for nothing, others for one thing each and for all, with ids at both ends."""
    rng = random.Random(num_columns)

    def ids(number: int) -> list[int]:
        return [rng.choice((0, num_columns - 1, *rng.choices(range(num_columns), k=6))) for _ in range(number)]

    def biases(number: int) -> dict[int, float]:
        return {token: rng.uniform(-20, 20) for token in rng.sample(range(num_columns), min(number, num_columns))}

    return [
        Context(),
        Context(ids(700), [], repetition=1.3),
        Context(ids(5), ids(400), repetition=0.7),
        Context(ids(5), ids(400) * 3, presence=1.5),
        Context(ids(5), ids(400) * 3, frequency=-0.25),
        Context(biases=biases(MAX_BIASES)),
        Context(ids(900), ids(300) * 5, 1.2, 0.5, 0.25, biases(300)),
    ]


def on_device(asked: list[Context], num_columns: int) -> Penalties:
    counts = np.stack([penalties.counted(each.prompt, each.output, num_columns) for each in asked])
    strengths = torch.tensor([[each.repetition, each.presence, each.frequency] for each in asked]).T.contiguous()
    bias_ids, biases = torch.zeros(len(asked), MAX_BIASES).int(), torch.zeros(len(asked), MAX_BIASES)
    for slot, each in enumerate(asked):
        bias_ids[slot, : len(each.biases)] = torch.tensor([*each.biases]).int()
        biases[slot, : len(each.biases)] = torch.tensor([*each.biases.values()])
    numbers = torch.tensor([len(each.biases) for each in asked])
    state = Penalties(torch.from_numpy(counts), *strengths, numbers, bias_ids, biases)
    return Penalties(*(column.cuda() for column in state))


def unconstrained(num_slots: int, num_columns: int) -> Constraints:
    none, words = torch.zeros(num_slots).long(), torch.zeros(num_slots, -(-num_columns // 32)).int()
    return Constraints(*(each.cuda() for each in (none, words, none, words, none, words)))


def unpenalised(num_slots: int, num_columns: int) -> Penalties:
    return on_device([Context() for _ in range(num_slots)], num_columns)


@each_size
@each_vocabulary
def test_penalised_logits_are_those_of_the_formula(num_columns: int, num_rows: int) -> None:
    asked = contexts(num_columns)
    slots = torch.tensor([(5, 6, 3, 0, 1, 4, 2)[row % 7] for row in range(num_rows)])
    generator = torch.Generator("cuda").manual_seed(num_columns + num_rows)
    # Rows lie apart, and what is between them is nobody's.
    whole = torch.randn(num_rows, num_columns + 64, generator=generator, device="cuda") * 6
    before = whole.clone()
    processing = LogitsProcessing(on_device(asked, num_columns), unconstrained(len(asked), num_columns))
    process_logits.launch(whole[:, :num_columns], slots.cuda(), torch.ones_like(slots).cuda(), processing)
    expected = torch.stack([asked[slot].shape(row) for slot, row in zip(slots, before[:, :num_columns], strict=True)])
    torch.testing.assert_close(whole[:, :num_columns].double(), expected, rtol=1e-6, atol=2e-5)
    assert torch.equal(whole[:, num_columns:], before[:, num_columns:])
    free = (slots == 0).cuda()
    assert torch.equal(whole[free], before[free])


@each_size
@each_vocabulary
def test_sampled_ids_are_counted(num_columns: int, num_rows: int) -> None:
    """Count step by step, with rows that yield nothing, padding and faults among them."""
    rng = random.Random(num_rows)
    counts = torch.zeros(num_rows + 1, num_columns, dtype=torch.int16)
    prompts = [rng.choices(range(num_columns), k=9) for _ in range(num_rows)]
    for slot, prompt in enumerate(prompts, 1):
        counts[slot] = torch.from_numpy(penalties.counted(prompt, [], num_columns))
    nothing = torch.zeros(num_rows + 1)
    state = Penalties(counts.cuda(), nothing, nothing, nothing, nothing, nothing, nothing)
    outputs: list[list[int]] = [[] for _ in range(num_rows)]
    slots = [*rng.sample(range(1, num_rows + 1), num_rows), 0, 0]
    for _ in range(6):
        yields = [rng.randrange(2) for _ in slots]
        ids = [rng.choice((0, num_columns - 1, rng.randrange(num_columns), -1, -2)) for _ in slots]
        penalties.count(*(torch.tensor(each).cuda() for each in (slots, yields, ids)), state)
        for slot, is_drawn, token in zip(slots, yields, ids, strict=True):
            if slot and is_drawn and token >= 0:
                outputs[slot - 1].append(token)
    expected = [penalties.counted(*each, num_columns) for each in zip(prompts, outputs, strict=True)]
    assert np.array_equal(state.counts[1:].cpu().numpy(), np.stack(expected))
    assert not state.counts[0].any()


def bits(words: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return bool [S, V] of bitmasks [S, W], as numpy reads them."""
    unpacked = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(unpacked[:, :num_columns].astype(bool))


@each_size
@each_vocabulary
def test_what_bans_limits_and_masks_leave_out_is_minus_infinity(num_columns: int, num_rows: int) -> None:
    torch.manual_seed(num_columns + num_rows)
    num_slots, num_words = 8, -(-num_columns // 32)
    words = torch.randint(-(2**31), 2**31, (3, num_slots, num_words), dtype=torch.int64).int()
    early, masked, limited = ((torch.arange(num_slots) >> bit) & 1 for bit in range(3))
    slots, lengths = torch.arange(num_rows) % num_slots, 5 + torch.arange(num_rows) % 3
    # Masks lie in another order than slots.
    mask_row = masked * (num_slots - torch.arange(num_slots))
    constraints = Constraints(7 * early, words[0], mask_row, words[1].flip(0), limited, words[2])
    logits = torch.randn(num_rows, num_columns)
    banned, in_mask, in_limit = (bits(each, num_columns)[slots] for each in words)
    is_early = (lengths < 7 * early[slots])[:, None]
    is_masked, is_limited = (masked[slots] > 0)[:, None], (limited[slots] > 0)[:, None]
    is_out = (is_early & banned) | (is_masked & ~in_mask) | (is_limited & ~in_limit)
    found = logits.cuda()
    processing = LogitsProcessing(unpenalised(num_slots, num_columns), Constraints(*(x.cuda() for x in constraints)))
    told = process_logits.launch(found, slots.cuda(), lengths.cuda(), processing)
    assert torch.equal(found.cpu(), logits.masked_fill(is_out, -torch.inf))
    assert torch.equal(told.cpu() > 0, (is_early | is_masked | is_limited)[:, 0])
    metadata = sample.SamplingMetadata(
        slots.cuda(),
        lengths.cuda(),
        (torch.arange(num_slots) % 3 * 0.6).cuda(),
        *torch.arange(3 * num_slots).view(3, -1).cuda(),
    )
    processed = LogitsProcessing(on_device([*contexts(num_columns), Context()], num_columns), processing.constraints)
    ids = sample.launch(logits.cuda(), metadata, processed)
    expected = sample.reference(logits.cuda(), metadata, processed)
    # What differs by the rounding of a logarithm may decide a close call.
    assert (ids != expected).sum() <= num_rows // 100
