from __future__ import annotations

import time

import pytest

from tests.engine import harness
from tests.engine.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(time.monotonic)
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture(params=[(0,), (0, 6)], ids=["one group", "two groups"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Set the default windows of a Setting: full attention alone, or beside layers with a sliding window."""
    monkeypatch.setattr(harness, "default_windows", request.param)
    return request.param
