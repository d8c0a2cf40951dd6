"""Counters of kernels: each weight has its own, all zero."""

from __future__ import annotations

import torch

from photon_grpc.kernels.lang.jit import CounterReserve, counters_of


def test_counters_of_two_weights_are_apart_and_those_of_one_are_kept() -> None:
    weights = torch.zeros(4), torch.zeros(4)
    first, second = (counters_of(weight, 40) for weight in weights)
    first.fill_(7)
    assert second.tolist() == [0] * 40
    assert counters_of(weights[0], 40) is first
    first.zero_()


def test_a_reserve_renews_itself_before_it_is_used_up() -> None:
    reserve = CounterReserve(torch.device("cpu"))
    pieces = [reserve.take(CounterReserve.SIZE // 3) for _ in range(7)]
    for number, piece in enumerate(pieces):
        assert not piece.any(), number
        piece.fill_(number + 1)
    assert [int(piece.min()) for piece in pieces] == [int(piece.max()) for piece in pieces] == list(range(1, 8))
