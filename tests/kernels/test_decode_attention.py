"""The torch reference of one-query attention against float64, and how many shares a row is given."""

from __future__ import annotations

import torch

from photon_grpc.kernels.attention import decode_attention, decode_launch
from tests.kernels.paged import Shape, expected, paged_batch, tolerance


def test_reference_equals_dense_attention() -> None:
    contexts = [1, 5, 16, 33]
    batch = paged_batch(Shape(6, 2, 32, 8), [1] * 4, contexts)
    out = torch.full((4, 6 * 32), torch.nan)
    q = batch.q.reshape(4, -1)
    decode_attention.launch(q, batch.cache, batch.layer, batch.meta, out, torch.zeros(8, dtype=torch.int32))
    torch.testing.assert_close(out.view(batch.q.shape).double(), expected(batch), **tolerance(torch.float32))


def test_short_contexts_and_large_batches_are_not_shared_out() -> None:
    assert decode_launch.num_splits(8, 512, 132, 512) == 1
    assert decode_launch.num_splits(64 * 8, 131072, 132, 128) == 1
    assert decode_launch.num_splits(8, 131072, 132, 512) == 16
    assert decode_launch.num_splits(8, 1024, 132, 512) == 2
