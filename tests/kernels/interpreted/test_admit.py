"""The write of admissions in the interpreter: what its torch reference writes, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch

from photon_grpc.kernels import admit
from photon_grpc.kernels.admit import SlotColumns, SlotRow


def columns(num_groups: int) -> SlotColumns:
    generator = torch.Generator().manual_seed(3)
    return SlotColumns(
        torch.randint(0, 90, (7, 2500), dtype=torch.int32, generator=generator),
        torch.randint(0, 90, (7, num_groups, 40), dtype=torch.int32, generator=generator),
        torch.randint(0, 90, (13, 7), generator=generator),
        torch.rand((6, 7), generator=generator),
    )


def row(slot: int, num_ids: int, num_blocks: int, num_groups: int) -> SlotRow:
    rng = random.Random(slot)
    return SlotRow(
        slot,
        tuple(rng.randrange(1 << 31) for _ in range(num_ids)),
        [tuple(rng.randrange(1 << 31) for _ in range(num_blocks)) for _ in range(num_groups)],
        tuple(rng.randrange(-(1 << 63), 1 << 63) for _ in range(13)),
        tuple(rng.choice((0.0, -0.0, 1e-40, -3.5, rng.random())) for _ in range(6)),
    )


@pytest.mark.parametrize("num_groups", [1, 3])
def test_slots_are_written_as_in_torch(num_groups: int) -> None:
    sizes = {4: (1, 1), 1: (2049, 33), 6: (1024, 40)}
    rows = [row(slot, *size, num_groups) for slot, size in sizes.items()]
    mine, theirs = columns(num_groups), columns(num_groups)
    admit.launch(rows, mine)
    admit.reference(rows, theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert not torch.equal(theirs.ints, columns(num_groups).ints)
