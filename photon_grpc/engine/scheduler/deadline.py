"""Finds deadlines that cannot be met before they cost other requests time.

On arrival only the fastest steps ever measured count, without any wait for others, which has no lower bound: refusing a
request that would have been served is worse than letting one wait in vain. When a request that has waited longer than
it has time left reaches the head of the queue, the durations of recent steps and outputs count. Otherwise an overloaded
queue would serve only requests that are about to expire.
"""

from __future__ import annotations

from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.scheduler.step_time_estimator import StepTimeEstimator
from photon_grpc.errors import DeadlineUnreachable

#: About the number of outputs in the mean of recent ones.
_NUM_RECENT = 50
#: An output is assumed to be as long as the mean of recent ones plus this many mean deviations, as for retransmission
#: timers (Jacobson, Congestion Avoidance and Control, 1988). Hardly any is longer.
_DEVIATIONS = 4.0
#: Safety factor, since steps vary and the first in a queue of equal deadlines has no time to spare.
_MARGIN = 1.25


class Deadlines:
    """Judges from measurements whether requests can meet their deadline.

    Args:
        max_num_batched_tokens: most tokens of a step.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        #: Gets every step.
        self.step_times = StepTimeEstimator()
        self._max_num_batched_tokens = max_num_batched_tokens
        #: Mean and mean deviation of recent outputs; 0 until one has ended.
        self._mean_tokens = self._deviation = 0.0

    def output_ended(self, num_generated: int) -> None:
        weight = 1 / _NUM_RECENT if self._mean_tokens else 1.0
        self._deviation += (abs(num_generated - self._mean_tokens) - self._deviation) * weight
        self._mean_tokens += (num_generated - self._mean_tokens) * weight

    def least_s(self, request: Request, num_cached: int = 0) -> float:
        """Return the least seconds for the request if nothing else is computed meanwhile.

        They cover the prompt without `num_cached` tokens and the fewest tokens that must be sampled. Return 0 while too
        little was measured, or if nothing must be sampled.
        """
        num_sampled = fewest_samples(request)
        if not num_sampled:
            return 0.0
        full, rest = divmod(request.num_given - num_cached, self._max_num_batched_tokens)
        prompt_s = full * self.step_times.least_s(self._max_num_batched_tokens) + self.step_times.least_s(rest)
        # The step that ends the prompt samples the first token.
        return prompt_s + self.step_times.least_decode_s(num_sampled - 1)

    def likely_s(self, request: Request, num_cached: int, num_running: int) -> float:
        """Return the likely seconds for the request, in steps like recent ones.

        They cover the rest of the prompt beside `num_running` rows and an output as long as most recent ones, at most
        max_tokens.
        """
        long_output = self._mean_tokens + _DEVIATIONS * self._deviation
        num_tokens = min(max(long_output, fewest_samples(request)), request.stop.max_tokens)
        budget = max(self._max_num_batched_tokens - num_running, 1)
        return _MARGIN * (-(-(request.num_given - num_cached) // budget) + num_tokens - 1) * self.step_times.recent_s

    def missed(self, seq: Sequence, num_cached: int, num_running: int, now_s: float) -> DeadlineUnreachable | None:
        """Return the error of a waiting sequence that cannot meet its deadline; None if it can, or has begun.

        Of a request with several outputs some may be complete: it ends at the deadline, not before.
        """
        request = seq.request
        if request.deadline_s is None or is_begun(seq) or not fewest_samples(request):
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


def is_begun(seq: Sequence) -> bool:
    """Return whether its request has had a slot: for itself, or for the leader that computes the shared prompt."""
    return any(each is not None and each.first_scheduled_s is not None for each in (seq, seq.leader))


def check_deadline(left_s: float, needed_s: float) -> None:
    """Raise DeadlineUnreachable if more time is needed than left.

    A deadline that has already passed is not refused here; it ends its request like any other.
    """
    if 0.0 < left_s < needed_s:
        message = (
            f"the shortest output takes at least {needed_s:.3f} s by the fastest steps measured; {left_s:.3f} s are "
            "left until the deadline: allow more time, shorten the prompt or let the output end sooner"
        )
        raise DeadlineUnreachable(message, needed=round(needed_s * 1000), limit=round(left_s * 1000))


def fewest_samples(request: Request) -> int:
    """Return the tokens that must be sampled before the deadline.

    Return 0 if the request may be answered without any, since its time limit comes first or the continued ids may
    already end the output.
    """
    if (
        request.deadline_s is not None
        and request.time_limit_s is not None
        and request.time_limit_s < request.deadline_s
    ):
        return 0
    num_continued = len(request.continued_ids)
    return max(request.least_tokens - num_continued, 0 if num_continued and _may_be_over(request) else 1)


def _may_be_over(request: Request) -> bool:
    """Return whether the continued ids may already end the output."""
    ids, stop = request.continued_ids, request.stop
    is_stopped = ids[-1] in stop.eos_token_ids or ids[-1] in stop.stop_token_ids
    return is_stopped or request.constraint is not None or len(ids) >= stop.max_tokens
