"""Deadlines that cannot be met: found before they cost others anything.

On arrival the fastest steps ever measured decide, and nothing of the wait for others, which nothing bounds from below:
a request that is refused though it would have been served has lost more than one that waits in vain. Of one that has
waited longer than it has left, the service is too slow for it, and the steps and outputs of late decide, when its turn
comes: else a queue would serve in turn what is about to expire, and nothing else.
"""

from __future__ import annotations

from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.scheduler.step_time_estimator import StepTimeEstimator
from photon_grpc.errors import DeadlineUnreachable

#: Outputs that the mean of recent ones goes back, about.
_NUM_RECENT = 50
#: An output is taken to be as long as the mean of recent ones and so many mean deviations, as timers of retransmission
#: are set (Jacobson, Congestion Avoidance and Control, 1988): hardly any is longer.
_DEVIATIONS = 4.0
#: Steps vary, and the first in a queue of equal deadlines has no time to spare.
_MARGIN = 1.25


class Deadlines:
    """Judges requests that have a deadline, by what was measured.

    Args:
        max_num_batched_tokens: of a step.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        #: Told of every step.
        self.pace = StepTimeEstimator()
        self._max_num_batched_tokens = max_num_batched_tokens
        #: Mean and mean deviation of recent outputs; 0 until one has ended.
        self._mean_tokens = self._deviation = 0.0

    def output_ended(self, num_generated: int) -> None:
        weight = 1 / _NUM_RECENT if self._mean_tokens else 1.0
        self._deviation += (abs(num_generated - self._mean_tokens) - self._deviation) * weight
        self._mean_tokens += (num_generated - self._mean_tokens) * weight

    def least_s(self, request: Request, num_cached: int = 0) -> float:
        """For the prompt but for `num_cached` tokens, and for the fewest tokens that may be drawn behind it, were
        nothing else computed meanwhile; 0 while too little was measured, and where nothing need be drawn."""
        num_drawn = fewest_samples(request)
        if not num_drawn:
            return 0.0
        full, rest = divmod(request.num_given - num_cached, self._max_num_batched_tokens)
        prompt_s = full * self.pace.least_s(self._max_num_batched_tokens) + self.pace.least_s(rest)
        # The first is drawn by the step that ends the prompt.
        return prompt_s + self.pace.least_decode_s(num_drawn - 1)

    def likely_s(self, request: Request, num_cached: int, num_running: int) -> float:
        """For the rest of the prompt beside `num_running` rows, and for a long one of recent outputs, at most
        max_tokens, in steps like recent ones."""
        long_output = self._mean_tokens + _DEVIATIONS * self._deviation
        num_tokens = min(max(long_output, fewest_samples(request)), request.stop.max_tokens)
        budget = max(self._max_num_batched_tokens - num_running, 1)
        return _MARGIN * (-(-(request.num_given - num_cached) // budget) + num_tokens - 1) * self.pace.recent_s

    def missed(self, seq: Sequence, num_cached: int, num_running: int, now_s: float) -> DeadlineUnreachable | None:
        """Return the failure of a sequence that waits, of which nothing was computed; None: it may still be in time."""
        request = seq.request
        if request.deadline_s is None or seq.first_scheduled_s is not None or not fewest_samples(request):
            return None
        left_s = request.deadline_s - now_s
        needed_s = self.least_s(request, num_cached)
        if now_s - request.arrival_s > left_s:
            needed_s = max(needed_s, self.likely_s(request, num_cached, num_running))
        if not 0.0 < left_s < needed_s:
            return None
        message = (
            f"after {now_s - request.arrival_s:.3f} s in the queue {left_s:.3f} s are left until the deadline; at the "
            f"present rate it would take about {needed_s:.3f} s: come back later or allow more time"
        )
        return DeadlineUnreachable(message, needed=round(needed_s * 1000), limit=round(left_s * 1000))


def check_deadline(left_s: float, needed_s: float) -> None:
    """Raise DeadlineUnreachable where more is needed than left. A deadline that has passed is not refused here: it
    ends its request as any other does."""
    if 0.0 < left_s < needed_s:
        message = (
            f"the shortest output takes at least {needed_s:.3f} s by the fastest steps measured; {left_s:.3f} s are "
            "left until the deadline: allow more time, shorten the prompt or let the output end sooner"
        )
        raise DeadlineUnreachable(message, needed=round(needed_s * 1000), limit=round(left_s * 1000))


def fewest_samples(request: Request) -> int:
    """Tokens that must be drawn before the deadline; 0 where the request may be answered without one: its time limit
    ends it before, with what it has, or the ids that it continues from do."""
    if (
        request.deadline_s is not None
        and request.time_limit_s is not None
        and request.time_limit_s < request.deadline_s
    ):
        return 0
    num_given = len(request.continued_ids)
    return max(request.least_tokens - num_given, 0 if num_given and _may_be_over(request) else 1)


def _may_be_over(request: Request) -> bool:
    """Return whether the ids that it continues from may end its output."""
    given, stop = request.continued_ids, request.stop
    is_stopped = given[-1] in stop.eos_token_ids or given[-1] in stop.stop_token_ids
    return is_stopped or request.constraint is not None or len(given) >= stop.max_tokens
