"""Attention of one query a row, shared out and joined in one kernel, against float64; every byte that no row may read is NaN.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import decode_attention
from tests.kernels.paged import Shape, expected, paged_batch, tolerance

pytestmark = pytest.mark.gpu
# (query heads, key heads, head size)
HEADS = [(32, 8, 64), (32, 8, 128), (4, 2, 32), (7, 1, 64), (16, 1, 128)]
# Rows of one key; shorter, as long as and longer than a step, a share; several shares.
CONTEXTS = {"short": [1, 2, 16, 17, 64, 65, 272], "long": [511, 512, 513, 514, 1, 1025, 2000], "one": [4096]}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_dense_attention(
    heads: tuple[int, int, int], dtype: torch.dtype, block_size: int, contexts: list[int], early: bool
) -> None:
    batch = paged_batch(Shape(*heads, block_size), [1] * len(contexts), contexts, dtype, "cuda")
    rows = len(contexts)
    counters = torch.zeros(rows * heads[1], dtype=torch.int32, device="cuda")
    q = torch.full((rows + 1, heads[0] * heads[2]), torch.nan, dtype=dtype, device="cuda")
    q[:rows] = batch.q.reshape(rows, -1)
    out = torch.full_like(q, torch.nan)
    for _ in range(2):
        decode_attention.launch(q, batch.cache, batch.layer, batch.meta, out, counters, history_is_settled=early)
    torch.testing.assert_close(out[:rows].view(batch.q.shape).double().cpu(), expected(batch), **tolerance(dtype))
    assert out[rows:].isnan().all()
    assert not counters.any()
