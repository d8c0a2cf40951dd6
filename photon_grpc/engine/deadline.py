"""Deadlines that the fastest steps ever measured cannot meet: refused on arrival, before they cost others anything.

The wait for others is not part of it: nothing bounds that from below, and a request that is refused though it would
have been served has lost more than one that waits in vain.
"""

from __future__ import annotations

from photon_grpc.core.frames import Facts
from photon_grpc.core.request import Request
from photon_grpc.engine.pace import Pace
from photon_grpc.errors import DeadlineUnreachable


def check_deadline(left_s: float, needed_s: float) -> None:
    """Raise DeadlineUnreachable where more is needed than left. A deadline that has passed is not refused here: it
    ends its request as any other does."""
    if 0.0 < left_s < needed_s:
        message = (
            f"the shortest output takes at least {needed_s:.3f} s by the fastest steps measured; {left_s:.3f} s are "
            "left until the deadline: allow more time or shorten the prompt"
        )
        raise DeadlineUnreachable(message, needed=round(needed_s * 1000), limit=round(left_s * 1000))


def least_seconds(request: Request, num_cached: int, pace: Pace, facts: Facts) -> float:
    """For the prompt but for `num_cached` tokens, and for the fewest tokens that may be drawn behind it, were nothing
    else computed meanwhile; 0 while too little was measured."""
    full, rest = divmod(request.num_given - num_cached, facts.max_num_batched_tokens)
    num_drawn = max(request.stop.min_tokens - len(request.continued_ids), 1)
    prompt_s = full * pace.least_s(facts.max_num_batched_tokens) + pace.least_s(rest)
    # The first is drawn by the step that ends the prompt.
    return prompt_s + (num_drawn - 1) * pace.least_s(1)
