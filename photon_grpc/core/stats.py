"""The engine's counters and gauges at one moment."""

from __future__ import annotations

import msgspec

#: Bounds of a retry's delay, and the delay while no rate is known.
_LEAST_WAIT_S, _MOST_WAIT_S, _UNKNOWN_WAIT_S = 0.1, 30.0, 1.0


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=13):
    """The engine at one moment, sent with every StepFrame and on change.

    free + cached + owned + limbo blocks = total.
    """

    running: int = 0
    queued: int = 0
    queued_prompt_tokens: int = 0
    total_blocks: int = 0
    owned_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    limbo_blocks: int = 0
    step_s: float = 0.0
    #: Averages over about a second; 0 while idle.
    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    #: Outputs that end per second while there is work, by which the queue drains. Kept while idle; 0 until measured.
    ended_per_s: float = 0.0
    #: Counters since the start.
    steps: int = 0
    #: Counted once per request, when its first output begins or ends, as callers are billed.
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    #: The part of them for requests with a session_id.
    session_cached_prompt_tokens: int = 0
    #: Sent to front ends.
    output_tokens: int = 0
    #: Computed past an output's end, never sent, never billed.
    overrun_tokens: int = 0
    preemptions: int = 0
    #: Numbers of keys and values beyond the range of the KV cache's 8 bits.
    saturated: int = 0
    #: Every output ends in one of three: finished (also by a stop string), failed or refused, cancelled.
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    #: Waiting sequences of the owner that has most of them; 0 if owners are not distinguished. Not a counter.
    longest_queue: int = 0
    #: Tokens that were drafted, and those that became output: by their place among the drafts of a step, the first
    #: first.
    draft_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    #: Those of ExpertTally; 0 where there are no experts.
    expert_layers: int = 0
    experts_reached: int = 0
    busiest_expert_tokens: int = 0
    expert_tokens: int = 0

    @property
    def experts_reached_per_step(self) -> float:
        """Experts that a step reaches in a layer, on average; 0 if none was counted."""
        return self.experts_reached / self.expert_layers if self.expert_layers else 0.0

    def expert_imbalance(self, num_experts: int) -> float:
        """Return the tokens of a layer's busiest expert over the mean of all; 0 if none was counted."""
        return self.busiest_expert_tokens * num_experts / self.expert_tokens if self.expert_tokens else 0.0

    @property
    def accepted_draft_tokens(self) -> int:
        return sum(self.accepted_at)

    @property
    def retry_after_s(self) -> float:
        """Seconds until the queue has drained at the measured rate, between 0.1 and 30; 1 until there is a rate."""
        if not self.ended_per_s:
            return _UNKNOWN_WAIT_S
        return min(_MOST_WAIT_S, max(_LEAST_WAIT_S, self.queued / self.ended_per_s))
