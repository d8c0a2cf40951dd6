"""When the kernels of both numbers of consumers are met: before anybody's long prompt, once, and never within a capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from photon_grpc.kernels.attention import varlen_launch

Launched = list[tuple[torch.Tensor, torch.Tensor, int]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """(q, cache, consumers) of every launch; nothing runs."""
    found: Launched = []

    def note(q: torch.Tensor, cache: torch.Tensor, layer: int, meta: Any, out: torch.Tensor, consumers: int) -> None:
        assert out.shape == q.shape and out.dtype == q.dtype == cache.dtype
        found.append((q, cache, consumers))

    monkeypatch.setattr(varlen_launch, "launch_tiles", note)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    varlen_launch.preload.cache_clear()
    yield found
    varlen_launch.preload.cache_clear()


def launch(q_heads: int = 8, num_queries: int = 300) -> torch.Tensor:
    q, cache = torch.zeros(num_queries, q_heads, 64), torch.zeros(3, 5, 2, 2, 128, 64)
    varlen_launch.launch(q, cache, 1, None, torch.empty_like(q))  # type: ignore[arg-type]
    return q


def test_the_first_launch_of_a_shape_meets_both(launched: Launched) -> None:
    q = launch()
    assert [consumers for _, _, consumers in launched[:-1]] == [2, 3] and launched[-1][0] is q
    launch(num_queries=20)
    assert len(launched) == 4
    launch(q_heads=16)
    assert len(launched) == 7


def test_stand_ins_are_compiled_as_what_follows(launched: Launched) -> None:
    launch()
    q, cache, _ = launched[-1]
    for stand_in, pages, consumers in launched[:-1]:
        assert varlen_launch.config(q.shape[1], cache, consumers) == varlen_launch.config(
            stand_in.shape[1], pages, consumers
        )
        assert stand_in.stride(0) % 16 == q.stride(0) % 16 == 0
        assert all(plane % 16 == 0 for plane in (*pages.stride()[:-1], *cache.stride()[:-1]))


def test_a_capture_holds_the_launch_alone(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q = launch()
    assert len(launched) == 1 and launched[0][0] is q
