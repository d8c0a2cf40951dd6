"""What steps take, by those that were measured, and the silence that the engine's loop may keep during one."""

from __future__ import annotations

#: Silence that is always allowed.
_SHORTEST_S = 5.0
#: A step may take so many times what is expected of it.
_SLACK = 10.0
#: Always allowed for a step larger than any that was measured.
_UNMEASURED_S = 60.0
#: Share of the estimate that a faster step leaves. It rises at once and falls slowly: contexts of steps differ.
_KEPT = 0.9
_NUM_BUCKETS = 64
#: Share of the average that a new step leaves.
_KEPT_OF_MEAN = 0.8


class Pace:
    """Seconds a step, for each power of two of its tokens."""

    def __init__(self) -> None:
        self._step_s = [0.0] * _NUM_BUCKETS
        self._mean_s = [0.0] * _NUM_BUCKETS

    def stepped(self, num_tokens: int, duration_s: float) -> None:
        """Record a step, from its launch until it was read. At most the allowance counts: a longer one was a pause of
        the machine or a compilation."""
        duration_s = min(duration_s, self.allowance_s(num_tokens))
        bucket = num_tokens.bit_length()
        fallen_s = _KEPT * self._step_s[bucket] + (1 - _KEPT) * duration_s
        self._step_s[bucket] = max(duration_s, fallen_s)
        mean_s = self._mean_s[bucket]
        self._mean_s[bucket] = _KEPT_OF_MEAN * mean_s + (1 - _KEPT_OF_MEAN) * duration_s if mean_s else duration_s

    def expected_s(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens takes at least, on average: what the largest took that were measured
        and are surely no larger; 0 where there are none."""
        largest = (num_tokens + 1).bit_length() - 1
        return next((mean_s for mean_s in self._mean_s[largest:0:-1] if mean_s), 0.0)

    def allowance_s(self, num_tokens: int) -> float:
        """Seconds within which steps of so many tokens are read; of 0 tokens: until the loop's next turn."""
        if not num_tokens:
            return _SHORTEST_S
        bucket = num_tokens.bit_length()
        known_s = self._step_s[bucket] or next((larger_s for larger_s in self._step_s[bucket + 1 :] if larger_s), 0.0)
        if known_s:
            return max(_SHORTEST_S, _SLACK * known_s)
        return max(_UNMEASURED_S, _SLACK * self._scaled_s(num_tokens))

    def _scaled_s(self, num_tokens: int) -> float:
        """From the largest steps that were measured, all smaller; 0 while there are none."""
        for smaller in range(num_tokens.bit_length() - 1, 0, -1):
            if known_s := self._step_s[smaller]:
                # In proportion to the fewest tokens that may have taken so long.
                return known_s * num_tokens / (1 << (smaller - 1))
        return 0.0
