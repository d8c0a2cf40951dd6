"""A deadline passes when a test says so, however slow the machine is."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """`time.monotonic`, and ahead of it by all that was skipped."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return self._real() + self._ahead_s

    def stop(self) -> None:
        """Let time pass only by `skip` from now on."""
        now_s = self._real()
        self._real = lambda: now_s

    def skip(self, seconds: float) -> None:
        self._ahead_s += seconds
