"""Estimates of step durations from measured ones, and the time that the engine's loop may take without a heartbeat."""

from __future__ import annotations

#: Time without a heartbeat that is always allowed.
_SHORTEST_S = 5.0
#: A step may take this many times its estimate.
_SLACK = 10.0
#: Always allowed for a step larger than any measured one.
_UNMEASURED_S = 60.0
#: Share of the estimate that remains after a faster step. It rises at once and falls slowly, since contexts differ.
_KEPT = 0.9
_NUM_BUCKETS = 64
#: About the number of steps in the mean of recent ones.
_NUM_RECENT = 20
#: Measured steps of a size before a request is refused because of them.
_LEAST_MEASURED = 3
#: Measured steps of one token before a long output is refused because of them. The first ones are slow, and a refused
#: request adds no measurement.
_ENOUGH_MEASURED = 16


class StepTimeEstimator:
    """Seconds per step, by the power of two of its tokens."""

    def __init__(self) -> None:
        self._step_s = [0.0] * _NUM_BUCKETS
        self._fastest_s = [0.0] * _NUM_BUCKETS
        self._num_measured = [0] * _NUM_BUCKETS
        #: Mean of recent steps of all sizes; 0 until there is one.
        self.recent_s = 0.0

    def stepped(self, num_tokens: int, duration_s: float) -> None:
        """Record a step, from its launch until it was read.

        At most the allowance counts; a longer step was a pause of the machine or a compilation.
        """
        duration_s = min(duration_s, self.allowance_s(num_tokens))
        bucket = num_tokens.bit_length()
        fallen_s = _KEPT * self._step_s[bucket] + (1 - _KEPT) * duration_s
        self._step_s[bucket] = max(duration_s, fallen_s)
        if duration_s > 0.0:
            # A failed step has no duration.
            fastest_s = self._fastest_s[bucket]
            self._fastest_s[bucket] = min(fastest_s, duration_s) if fastest_s else duration_s
            self._num_measured[bucket] += 1
            self.recent_s += (duration_s - self.recent_s) / (_NUM_RECENT if self.recent_s else 1)

    def least_s(self, num_tokens: int) -> float:
        """Return the least seconds of a step of this size, by the fastest measured ones.

        That is one of its own bucket, scaled down as if it had been as large as the bucket allows, or one of a smaller
        bucket. Return 0 if too few were measured.
        """
        own = num_tokens.bit_length()
        for bucket in range(own, 0, -1):
            if self._num_measured[bucket] >= _LEAST_MEASURED:
                return self._fastest_s[bucket] * (num_tokens / (1 << own) if bucket == own else 1.0)
        return 0.0

    def least_decode_s(self, num_steps: int) -> float:
        """Return the least seconds of this many steps of one token.

        Until enough were measured, no more steps are counted than were measured.
        """
        num_measured = self._num_measured[1]
        counted = num_steps if num_measured >= _ENOUGH_MEASURED else min(num_steps, num_measured)
        return counted * self.least_s(1)

    def allowance_s(self, num_tokens: int) -> float:
        """Return the seconds allowed to read steps of this many tokens; for 0 tokens, until the loop's next turn."""
        if not num_tokens:
            return _SHORTEST_S
        bucket = num_tokens.bit_length()
        known_s = self._step_s[bucket] or next((larger_s for larger_s in self._step_s[bucket + 1 :] if larger_s), 0.0)
        if known_s:
            return max(_SHORTEST_S, _SLACK * known_s)
        return max(_UNMEASURED_S, _SLACK * self._scaled_s(num_tokens))

    def _scaled_s(self, num_tokens: int) -> float:
        """Scale up the largest measured steps, all of which are smaller; 0 while there are none."""
        for smaller in range(num_tokens.bit_length() - 1, 0, -1):
            if known_s := self._step_s[smaller]:
                # Assume the fewest tokens of the bucket, for an upper bound.
                return known_s * num_tokens / (1 << (smaller - 1))
        return 0.0
