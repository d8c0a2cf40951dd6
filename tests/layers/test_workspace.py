"""Buffers of a step: the sums of squares are those of the stream, whichever KVGroup's layer changed it last."""

from __future__ import annotations

import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.rotary.rotate_store import Rotation
from photon_grpc.layers.workspace import RowSums, Workspace


def workspaces() -> tuple[Workspace, Workspace]:
    """Return those of two KVGroups of one step."""
    h, sums = torch.randn(3, 64), RowSums(torch.full((3, 4), torch.nan))
    nothing, number = torch.empty(0), torch.arange(3)
    rotation = Rotation(nothing, nothing, number, number)
    one, other = (Workspace(8, h, sums, nothing, nothing, nothing, rotation, number) for _ in range(2))
    return one, other


def test_sums_are_made_once_and_kept() -> None:
    work, _ = workspaces()
    assert torch.equal(work.stream().partial, squares.reference(work.h))
    work.sums.partial.zero_()
    assert not work.stream().partial.any()


def test_a_layer_of_another_group_makes_them_anew_after_a_change_that_left_none() -> None:
    one, other = workspaces()
    for work in (one, other):
        work.stream()
    one.h.add_(1.0)
    one.outdated()
    assert torch.equal(other.stream().partial, squares.reference(one.h))


def test_what_is_taken_from_a_layer_that_is_not_fused_has_no_sums() -> None:
    work, _ = workspaces()
    work.stream()
    work.take(torch.ones(3, 64), torch.ones(3, 64))
    assert torch.equal(work.stream().partial, torch.full((3, 4), 64.0))
