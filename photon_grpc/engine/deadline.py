"""Deadlines that cannot be met, by measured rates: refused on arrival, before they cost others anything."""

from __future__ import annotations

from photon_grpc.core.frames import Facts
from photon_grpc.core.request import Request
from photon_grpc.core.stats import Load
from photon_grpc.engine.pace import Pace
from photon_grpc.errors import DeadlineUnreachable


def check_deadline(seconds_left: float, needed_s: float) -> None:
    """Raise DeadlineUnreachable where more is needed than left. A deadline that has passed is not refused here: it
    ends its request as any other does."""
    if 0.0 < seconds_left < needed_s:
        message = (
            f"the shortest output takes about {needed_s:.3f} s by the measured rates; {seconds_left:.3f} s are left "
            "until the deadline: allow more time or shorten the prompt"
        )
        raise DeadlineUnreachable(message, needed=round(needed_s * 1000), limit=round(seconds_left * 1000))


def seconds_queued(num_ahead: int, load: Load) -> float:
    """Until `num_ahead` outputs have left their seats; 0 while no rate is known."""
    return num_ahead / load.ended_per_s if load.ended_per_s else 0.0


def seconds_computed(request: Request, num_cached: int, pace: Pace, facts: Facts) -> float:
    """For the prompt but for `num_cached` tokens, and for the fewest tokens that may be drawn behind it; 0 while no
    step was measured. Steps are taken to be as fast as if nothing else ran in them."""
    full, rest = divmod(request.num_given - num_cached, facts.max_num_batched_tokens)
    num_left = request.stop.min_tokens - len(request.continued_ids)
    prompt_s = full * pace.expected_s(facts.max_num_batched_tokens) + pace.expected_s(rest)
    return prompt_s + max(num_left - 1, 0) * pace.expected_s(1)
