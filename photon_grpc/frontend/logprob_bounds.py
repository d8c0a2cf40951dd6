"""The bytes that log-probabilities may take in a message.

Requests are refused or shortened before they start, so that no finished call fails by the size of its message.
"""

from __future__ import annotations

import msgspec

from photon_grpc.core.request import FinishReason, Request
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.input.tokenizer import Tokenizer

#: Upper bound for one scored id in a message, without its token's bytes.
BYTES_PER_ID = 32
#: Upper bound for a message, and for each of its outputs, without tokens: request id, usage, the longest stop string.
BYTES_PER_OUTPUT = 2048


def fit_to_message(
    request: Request, max_message_bytes: int, tokenizer: Tokenizer | None, *, num_texts: int = 1
) -> Request:
    """Lower `max_tokens`, unless the caller set it, to what one message can hold with all log-probabilities.

    A stream has the same bound as a single answer, since a slow reader may get everything in one message. `num_texts`
    counts how often a message holds the text, as a whole and in parts. The ids that an output continues from count as
    if they were sent, so that it ends where the uninterrupted output does.

    Raise InvalidRequest if the prompt's log-probabilities, max_tokens or min_tokens do not fit.
    """
    scores, stop, num_outputs = request.logprobs, request.stop, request.num_outputs
    bytes_per_id = BYTES_PER_ID + (0 if tokenizer is None else tokenizer.max_token_bytes)
    room = max_message_bytes - BYTES_PER_OUTPUT * (1 + num_outputs)
    if scores.num_prompt_records:
        # A position has an id and text beside its records, which take no more than another record.
        prompt_bytes = len(request.prompt_ids) * (1 + scores.num_prompt_records) * bytes_per_id
        what = f"{scores.num_prompt_records} log-probabilities of each of {len(request.prompt_ids)} prompt tokens"
        _check("output.prompt_logprobs", what, prompt_bytes, room)
        room -= prompt_bytes
    if not scores.num_records:
        return request
    token_bytes = num_outputs * (num_texts + scores.num_records) * bytes_per_id
    is_set = stop.limit_reason is FinishReason.MAX_TOKENS
    least = max(stop.max_tokens if is_set else stop.min_tokens, 1)
    field = "output.logprobs" if scores.num_logprobs >= 0 else "output.score_token_ids"
    what = f"{scores.num_records} log-probabilities of each of {num_outputs} x {least} output tokens"
    _check(field, what, least * token_bytes, room)
    max_tokens = min(stop.max_tokens, room // token_bytes)
    return msgspec.structs.replace(request, stop=msgspec.structs.replace(stop, max_tokens=max_tokens))


def _check(field: str, what: str, needed: int, room: int) -> None:
    if needed > room:
        message = f"{field}: {what} may take {needed} bytes; a message has room for {max(room, 0)}"
        raise InvalidRequest(message, field=field, needed=needed, limit=max(room, 0))
