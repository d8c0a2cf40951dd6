"""Plain data of a generation that client and front end share.

Standard library only: the client installs without msgspec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Text, or the messages of a chat, `{"role": "user", "content": "..."}`, or token ids.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An alternative token at a position."""

    token_id: int
    #: Natural logarithm of its probability: the log-softmax of raw logits.
    logprob: float
    #: Its rank among all tokens; 1 is the most likely.
    rank: int
    #: Its bytes, possibly part of a character; empty without a tokenizer.
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The model's probability of one token."""

    token_id: int
    #: As a Candidate's; None for the first token of a prompt, whose rank is 0.
    logprob: float | None
    rank: int
    token_bytes: bytes = b""
    #: The N most likely tokens, most likely first, then the ids that the caller named.
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an output asks its reader to make, or of an earlier turn."""

    #: 0, 1, ... in its output. In a request the order counts.
    index: int
    name: str
    #: A JSON object, as the model wrote it.
    arguments_json: str
    #: Names the call for the message that answers it.
    id: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """Facts known when a request is admitted, sent with the first token."""

    request_id: str
    model: str
    #: Also set if the server chose it.
    seed: int
    #: When the request arrived, in wall-clock seconds since the epoch.
    create_time_s: float
    #: Empty unless OutputOptions.prompt_token_ids asks for them.
    prompt_token_ids: tuple[int, ...] = ()
    #: One for each token of the prompt; empty unless OutputOptions.prompt_logprobs asks for them.
    prompt_scores: tuple[TokenScore, ...] = ()
    #: The version of photon_grpc that answers, such as "0.1.0".
    release: str = ""
    #: The version of the numerics that it computes with; equal ones give equal bits where docs/numerics.md promises it.
    numerics_version: str = ""


@dataclass(frozen=True, slots=True)
class OutputUsage:
    """Tokens of one output that a call delivered, including the one that ended it."""

    output_tokens: int = 0
    #: Tokens that were drafted for it, and those that became output.
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations from arrival, by the server's clock."""

    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    preemption_count: int = 0
