"""Checks that a request fits the model, the KV cache and the queue, shared by front ends and the engine.

Each is a pure function of numbers that raises an error of `photon_grpc.errors` or returns nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from photon_grpc.config.label_key import LABEL_KEY, LABEL_KEY_RULE, MAX_LABELS
from photon_grpc.core.fields import FIELDS
from photon_grpc.core.frames import Facts
from photon_grpc.core.request import Request
from photon_grpc.core.stats import Load
from photon_grpc.errors import InvalidRequest, KVCapacity, PromptTooLong, QueueFull

MAX_REQUEST_ID_CHARS = FIELDS["request_id"].max_chars
MAX_LABEL_CHARS = FIELDS["labels"].max_chars
#: Characters of a wrong key in an error.
_MAX_KEY_CHARS = 64
_MAX_TOKENS = "stop.max_tokens"


class IdList(NamedTuple):
    """Token ids of a request, and how many of them may stand in `field`; None: any number."""

    field: str
    ids: Sequence[int]
    max_count: int | None = None
    #: `max_count` is the context, which must also hold an output.
    is_prompt: bool = False
    #: The place of a wrong id within `field`, as `check_ids` has it.
    at: str = "[{index}]"


def check_given(request_id: str, lists: Iterable[IdList], vocab_size: int) -> None:
    """Check the id of a request and the token ids in its fields. Raise InvalidRequest, PromptTooLong."""
    check_request_id(request_id)
    for field, ids, max_count, is_prompt, at in lists:
        if not ids:
            raise InvalidRequest(f"{field}: must not be empty", field=field)
        if max_count is not None and is_prompt:
            check_prompt(len(ids), max_count, field)
        elif max_count is not None:
            check_count(len(ids), max_count, field)
        check_ids(ids, vocab_size, field, at=at)


def check_request_id(request_id: str, field: str = "request_id") -> None:
    """Raise InvalidRequest naming `field` for an id that is too long or not printable ASCII."""
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        message = f"{field}: has {len(request_id)} characters; {MAX_REQUEST_ID_CHARS} are allowed"
        raise InvalidRequest(message, field=field, needed=len(request_id), limit=MAX_REQUEST_ID_CHARS)
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(f"{field}: must be printable ASCII", field=field)


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise InvalidRequest for too many labels, a wrong key or a long value."""
    check_count(len(labels), MAX_LABELS, "labels")
    for key, value in labels.items():
        field = f"labels[{json.dumps(key[:_MAX_KEY_CHARS])}]"
        if not LABEL_KEY.fullmatch(key):
            raise InvalidRequest(f"{field}: a key is {LABEL_KEY_RULE}", field=field)
        if len(value) > MAX_LABEL_CHARS:
            message = f"{field}: has {len(value)} characters; {MAX_LABEL_CHARS} are allowed"
            raise InvalidRequest(message, field=field, needed=len(value), limit=MAX_LABEL_CHARS)


def check_not_empty(request: Request) -> None:
    """Raise InvalidRequest for a request without a prompt, an output or a token to compute."""
    for field, count in (
        ("token_ids", len(request.prompt_ids)),
        ("sampling.num_outputs", request.num_outputs),
        ("stop.max_tokens", request.stop.max_tokens),
    ):
        if count < 1:
            message = f"{field}: is {count}; at least 1 is needed"
            raise InvalidRequest(message, field=field, needed=count, limit=1)


def check_prompt(num_prompt: int, max_model_len: int, field: str) -> None:
    """Raise PromptTooLong if the context has no room for one token after the prompt, which `field` holds."""
    if num_prompt >= max_model_len:
        message = f"the prompt has {num_prompt} tokens; the context holds {max_model_len} with the output: shorten it"
        raise PromptTooLong(message, field=field, needed=num_prompt + 1, limit=max_model_len)


def check_output(num_prompt: int, max_tokens: int, facts: Facts) -> None:
    """Raise PromptTooLong if prompt and output exceed the context, KVCapacity if they exceed the KV cache."""
    needed = num_prompt + max_tokens
    if needed > facts.max_model_len:
        message = (
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} are {needed}; "
            f"the context holds {facts.max_model_len}: lower max_tokens or shorten the prompt"
        )
        raise PromptTooLong(message, field=_MAX_TOKENS, needed=needed, limit=facts.max_model_len)
    check_kv(num_prompt, max_tokens, facts, _MAX_TOKENS)


def check_kv(num_prompt: int, max_tokens: int, facts: Facts, field: str) -> None:
    """Raise KVCapacity if all KV blocks together cannot hold the request."""
    num_tokens = _num_stored(num_prompt, max_tokens)
    needed = facts.kv.blocks(num_tokens)
    if needed > facts.num_blocks:
        message = (
            f"prompt and output need {needed} KV blocks of {facts.kv.block_size} tokens{_in_groups(facts)} at once; "
            f"the cache has {facts.num_blocks}: ask for fewer tokens"
        )
        raise KVCapacity(message, field=field, needed=needed, limit=facts.num_blocks)


def max_output_tokens(num_prompt: int, facts: Facts) -> int:
    """Return the largest `max_tokens` that `check_output` accepts after a prompt of this length."""
    return min(facts.max_model_len, facts.kv.tokens(facts.num_blocks) + 1) - num_prompt


def check_queue(num_prompt: int, load: Load, facts: Facts) -> None:
    """Raise QueueFull if one more request, of `num_prompt` tokens, exceeds the queue. An empty queue takes any."""
    if load.queued >= facts.max_queue_size:
        raise _queue_full("requests", load.queued, 1, facts.max_queue_size, load)
    if load.queued and load.queued_prompt_tokens + num_prompt > facts.max_queued_tokens:
        raise _queue_full("prompt tokens", load.queued_prompt_tokens, num_prompt, facts.max_queued_tokens, load)


def missing_room(num_prompt: int, load: Load, facts: Facts) -> tuple[int, int]:
    """Return how many requests and tokens must leave the queue to admit a request of `num_prompt` tokens."""
    num_tokens = load.queued_prompt_tokens + num_prompt - facts.max_queued_tokens if load.queued else 0
    return max(load.queued + 1 - facts.max_queue_size, 0), max(num_tokens, 0)


def check_ids(ids: Sequence[int], vocab_size: int, field: str, *, at: str = "[{index}]") -> None:
    """Raise InvalidRequest for an id outside the vocabulary. `at` is its place in `field`, by its index or itself."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        index, wrong = next((index, id) for index, id in enumerate(ids) if not 0 <= id < vocab_size)
        path = field + at.format(index=index, id=wrong)
        message = f"{path}: holds the id {wrong}; ids are from 0 to {vocab_size - 1}"
        raise InvalidRequest(message, field=path, needed=wrong, limit=0 if wrong < 0 else vocab_size - 1)


def check_count(count: int, limit: int, field: str) -> None:
    """Raise InvalidRequest for a list with more than `limit` entries."""
    if count > limit:
        message = f"{field}: has {count} entries; {limit} are allowed"
        raise InvalidRequest(message, field=field, needed=count, limit=limit)


def _in_groups(facts: Facts) -> str:
    num_groups = len(facts.kv.groups)
    return f" in {num_groups} groups of layers" if num_groups > 1 else ""


def _num_stored(num_prompt: int, max_tokens: int) -> int:
    """Return the tokens whose keys and values are stored: all but the last, which is never computed."""
    return num_prompt + max_tokens - 1


def _queue_full(what: str, waiting: int, more: int, limit: int, load: Load) -> QueueFull:
    message = f"{waiting} {what} are waiting; the queue holds {limit}"
    return QueueFull(message, needed=waiting + more, limit=limit, retry_after_s=load.retry_after_s)
