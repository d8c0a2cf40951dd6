"""The write of admissions on a GPU: what its torch reference writes, and nothing else, while other launches run.

python -m pytest -m gpu tests/gpu/kernels/test_admit_on_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import admit
from photon_grpc.kernels.admit import SlotColumns
from tests.kernels.interpreted.test_admit import columns, row

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_groups", [1, 3])
def test_slots_are_written_as_in_torch(num_groups: int) -> None:
    sizes = {4: (1, 1), 1: (2049, 33), 6: (1024, 40), 2: (2500, 7)}
    rows = [row(slot, *size, num_groups) for slot, size in sizes.items()]
    mine, theirs = (SlotColumns(*(each.cuda() for each in columns(num_groups))) for _ in range(2))
    for some in (rows[:1], rows[1:]):
        admit.launch(some, mine)
    admit.reference(rows, theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
