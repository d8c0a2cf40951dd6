"""A generation's plain data that is the same inside and outside: the client has it from the wire, the front end puts it
there.

Standard library only: the client installs without msgspec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Text; or the messages of a chat, `{"role": "user", "content": "..."}`; or token ids.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could have stood there."""

    token_id: int
    #: Natural logarithm of its probability: the log-softmax of raw logits.
    logprob: float
    #: Its place among all tokens; 1 is the most likely.
    rank: int
    #: Its bytes, perhaps part of a character; empty without a tokenizer.
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The model's probability of one token."""

    token_id: int
    #: As a Candidate's; None for the first token of a prompt, whose rank is 0.
    logprob: float | None
    rank: int
    token_bytes: bytes = b""
    #: The N best, best first, then the ids that the caller gave.
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an output asks its reader to make."""

    #: 0, 1, ... in its output.
    index: int
    name: str
    #: A JSON object, as the model wrote it.
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Start:
    """Known when a request is admitted; told with the first token."""

    request_id: str
    model: str
    #: Also when the server drew it.
    seed: int
    #: Wall-clock seconds since the epoch.
    create_time_s: float
    #: Empty unless OutputOptions.prompt_token_ids asks for them.
    prompt_token_ids: tuple[int, ...] = ()
    #: One for each token of the prompt; empty unless OutputOptions.prompt_logprobs asks for them.
    prompt_scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """On the server's clock, from arrival."""

    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    preemption_count: int = 0
