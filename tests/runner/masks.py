"""Bitmasks as an engine gives them, and batches with rows that wait for them."""

from __future__ import annotations

from collections.abc import Collection

from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.request import SamplingParams

VOCAB_SIZE = 320
GREEDY = SamplingParams(temperature=0.0)
#: Of slots 1 to 5; rows 0, 2 and 4 wait for masks.
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.2, seed=4),
    GREEDY,
    SamplingParams(temperature=1.3, top_k=50, top_p=0.99, seed=5),
)
MASKED = (0, 2, 4)
#: Allowed ids of each masked row, step by step.
ALLOWED = (
    ({7, 31, 32, 300}, set(range(0, 320, 3)), {63, 64}),
    ({319, 0}, {5}, set(range(100, 120))),
)


def masks(*allowed: Collection[int]) -> memoryview:
    """Return a bitmask for each row, with the bits of these ids set."""
    bits = (sum(1 << token for token in ids) for ids in allowed)
    return memoryview(bytearray().join(number.to_bytes(VOCAB_SIZE // 8, "little") for number in bits))


def admissions(**more: object) -> tuple[Admission, ...]:
    return tuple(
        Admission(slot, (slot, 5, 9, 7 * slot), 4, 0, ((2 * slot, 2 * slot + 1),), sampling, **more)  # type: ignore[arg-type]
        for slot, sampling in enumerate(SAMPLINGS, 1)
    )


def batches(masked: tuple[int, ...]) -> list[Batch]:
    """Return a prompt's step, then steps of one token each; `masked` in the first two."""
    slots, ones = (1, 2, 3, 4, 5), (1,) * 5
    return [
        Batch(1, slots, (4,) * 5, ones, admissions=admissions(), masked=masked),
        Batch(2, slots, ones, ones, masked=masked),
        Batch(3, slots, ones, ones),
    ]
