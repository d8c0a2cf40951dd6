"""What is counted. Named for Prometheus in `server/metrics.py` only."""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine at one moment, sent with every frame of tokens. free + cached + owned + limbo blocks = total."""

    running: int = 0
    queued: int = 0
    queued_prompt_tokens: int = 0
    total_blocks: int = 0
    owned_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    limbo_blocks: int = 0
    step_s: float = 0.0
    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    #: Since start, monotone:
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    #: Computed past an output's end, never billed.
    overrun_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    failed: int = 0
    #: Seconds a newcomer is told to wait, from the measured drain rate.
    retry_after_s: float = 1.0
