"""How long the engine's loop may stay silent, from how long its steps were seen to take."""

from __future__ import annotations

#: Silence that is always allowed.
_SHORTEST_S = 5.0
#: A step may take so many times what is expected of it.
_SLACK = 10.0
#: Allowed for a step while none has been measured.
_UNMEASURED_S = 60.0
#: How much of the estimate a faster step leaves: it rises at once and falls slowly, since steps of as many tokens differ in their contexts.
_KEPT = 0.9
_NUM_BUCKETS = 64


class Pace:
    """Seconds a step, for each power of two of its tokens."""

    def __init__(self) -> None:
        self._step_s = [0.0] * _NUM_BUCKETS

    def stepped(self, num_tokens: int, duration_s: float) -> None:
        """A step of so many tokens took so long, from its launch until it was read."""
        bucket = num_tokens.bit_length()
        fallen_s = _KEPT * self._step_s[bucket] + (1 - _KEPT) * duration_s
        self._step_s[bucket] = max(duration_s, fallen_s)

    def allowance_s(self, num_tokens: int) -> float:
        """How long it may take until steps of so many tokens are read; none: until the next turn of the loop."""
        if not num_tokens:
            return _SHORTEST_S
        expected_s = self._expected_s(num_tokens)
        return max(_SHORTEST_S, _SLACK * expected_s) if expected_s else _UNMEASURED_S

    def _expected_s(self, num_tokens: int) -> float:
        """0 while nothing is known."""
        bucket = num_tokens.bit_length()
        if known_s := self._step_s[bucket]:
            return known_s
        for smaller in range(bucket - 1, 0, -1):
            if known_s := self._step_s[smaller]:
                # In proportion to the fewest tokens that may have taken so long.
                return known_s * num_tokens / (1 << (smaller - 1))
        return next((known_s for known_s in self._step_s[bucket:] if known_s), 0.0)
