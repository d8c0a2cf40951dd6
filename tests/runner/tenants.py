"""Tenants of slots after others: garbage wherever an earlier tenant may have left data, which outputs must not show."""

from __future__ import annotations

import random

import torch

from photon_grpc.core.batch import Admission, Batch, Growth
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.request import SamplingParams
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.slot_table import SlotTable

NUM_SEQS = 4
BLOCK_SIZE = 8
NUM_DECODED = 9
GREEDY = SamplingParams(temperature=0.0)
NOISE = SamplingParams(temperature=0.9, seed=2**64 - 1)
FILTERED = SamplingParams(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01, seed=4)
#: Ids below the last are most of what the model may say.
MOST_IDS = tuple(range(310))

#: Per step width what the tenants of slots 2, 3 and 4 ask for: sampling, min_tokens, banned until then. Slot 1 is
#: greedy.
TENANTS: dict[str, tuple[tuple[SamplingParams, int, tuple[int, ...]], ...]] = {
    "greedy": ((GREEDY, 0, ()), (GREEDY, 6, ()), (GREEDY, 0, ())),
    "noise": ((NOISE, 0, ()), (NOISE, 6, ()), (GREEDY, 6, ())),
    "filtered": ((FILTERED, 6, ()), (NOISE, 6, ()), (GREEDY, 6, ())),
    "banned": ((FILTERED, 6, MOST_IDS), (GREEDY, 4, (7,)), (GREEDY, 6, ())),
}


def poison(table: SlotTable, slot: int, rng: random.Random) -> None:
    """Replace all that the table holds of this slot, on the device and the host, by other valid data."""
    for name, value in vars(table).items():
        if name in ("_masked", "_mask_copy", "masks", "write", "numbers"):
            continue  # of a batch or of the table, not of a slot; numbers are rows of _floats and _ints
        if isinstance(value, torch.Tensor):
            (dim,) = (dim for dim, size in enumerate(value.shape) if size == len(table.max_computed))
            _overwrite(name, value.select(dim, slot), rng)
        elif isinstance(value, list | dict):
            value[slot] = rng.randrange(2**40)
        elif isinstance(value, set):
            (value.add if rng.random() < 0.5 else value.discard)(slot)
        else:
            assert isinstance(value, torch.device | KVPlan | int), f"{name}: say here what may be left in it"


def _overwrite(name: str, place: torch.Tensor, rng: random.Random) -> None:
    if place.dtype.is_floating_point:
        place.fill_(float("nan"))
        return
    # Ids of a vocabulary of 320 and of blocks that others use; of other columns no number is too large.
    limit = {"token_ids": 320, "block_table": 4 * NUM_SEQS, "banned_ids": 2**31}.get(name, 2**40)
    garbage = [rng.randrange(limit) for _ in range(place.numel())]
    place.copy_(torch.tensor(garbage, device=place.device).view(place.shape))


def outputs_of(runner: ModelRunner, kind: str, garbage: random.Random | None) -> list[tuple[int, ...]]:
    """Return the ids of every step: slot 1 is running when the others are admitted, over `garbage` if given.

    Each gets its second block when it needs it.
    """
    first = _admission(1, (GREEDY, 0, ()))
    outputs = [_ids(runner, Batch(1, (1,), (5,), (1,), admissions=(first,)))]
    if garbage is not None:
        for slot in range(2, NUM_SEQS + 1):
            poison(runner.table, slot, garbage)
    newcomers = tuple(_admission(slot, tenant) for slot, tenant in enumerate(TENANTS[kind], 2))
    slots, ones = tuple(range(1, NUM_SEQS + 1)), (1,) * NUM_SEQS
    outputs.append(
        _ids(runner, Batch(2, slots, (1, *(5 for _ in newcomers)), ones, left=slots[1:], admissions=newcomers))
    )
    for step in range(3, 3 + NUM_DECODED):
        # Before this step slot 1 has 3 + step tokens, the others one less.
        grown = tuple(Growth(slot, 0, 1, (2 * slot,)) for slot in slots if 3 + step - (slot > 1) == BLOCK_SIZE)
        outputs.append(_ids(runner, Batch(step, slots, ones, ones, grown=grown)))
    return outputs


def _admission(slot: int, tenant: tuple[SamplingParams, int, tuple[int, ...]]) -> Admission:
    sampling, min_tokens, banned = tenant
    prompt = (slot, 5, 9, 7 * slot, 3)
    return Admission(slot, prompt, 5, 0, ((2 * slot - 1,),), sampling, 0, min_tokens, banned)


def _ids(runner: ModelRunner, batch: Batch) -> tuple[int, ...]:
    output = runner.submit(batch).result()
    assert not output.faults
    return output.ids
