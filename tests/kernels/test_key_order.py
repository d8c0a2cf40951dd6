"""The order of keys that the attention kernels share, in torch: it is softmax, and empty updates change nothing."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.attention.key_order import CLASSES, ORDERS, KeyOrder, num_lanes
from photon_grpc.kernels.attention.metadata import LOG2_E
from tests.kernels import ordered_attention
from tests.kernels.paged import tolerance

CONTEXTS = (1, 2, 63, 64, 65, 128, 272, 511, 512, 513, 1500)


def tensors(context: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(context)
    # Scores as far apart as those of sharp heads: maxima grow in later lanes.
    q, keys, values = (torch.randn(rows, head_dim, generator=generator) for rows in (4, context, context))
    return (4 * q).to(dtype), keys.to(dtype), values.to(dtype)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", ORDERS)
def test_it_is_the_softmax_of_all_keys(head_dim: int, dtype: torch.dtype, context: int) -> None:
    q, keys, values = tensors(context, head_dim, dtype)
    scale = head_dim**-0.5
    found = ordered_attention.attend(q, keys, values, scale * LOG2_E, ORDERS[head_dim])
    wanted = (q.double() @ keys.double().T * scale).softmax(-1) @ values.double()
    torch.testing.assert_close(found.double(), wanted, **tolerance(dtype))


@pytest.mark.parametrize("lane", [256, 512, 1024])
@pytest.mark.parametrize("context", [1, 64, 272, 513, 1500])
def test_updates_and_lanes_without_a_visible_key_change_no_bit(context: int, lane: int) -> None:
    q, keys, values = tensors(context, 128, torch.bfloat16)
    order = KeyOrder(64, lane)
    alone = ordered_attention.attend(q, keys, values, 0.1, order)
    for padded in (1, 7, 30):
        assert torch.equal(ordered_attention.attend(q, keys, values, 0.1, order, padded), alone)


@pytest.mark.parametrize("head_dim", ORDERS)
def test_lanes_are_whole_updates_and_updates_whole_steps_of_a_tensor_core(head_dim: int) -> None:
    update, lane = ORDERS[head_dim]
    assert lane % update == 0 and update % 16 == 0 and update % CLASSES == 0
    assert [num_lanes(keys, lane) for keys in (1, lane, lane + 1)] == [1, 1, 2]
