"""The bytes that scores may take of a message: refused or shortened at the door, so that no finished call dies of its
own size."""

from __future__ import annotations

import msgspec

from photon_grpc.core.request import FinishReason, Request
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.input.tokenizer import Tokenizer

#: A scored id takes so many bytes of a message at most, beside those of its token.
BYTES_PER_ID = 32
#: A message, and each of its outputs, beside tokens and their scores: request id, usage, the longest stop string.
BYTES_PER_OUTPUT = 2048


def fitted(request: Request, max_message_bytes: int, tokenizer: Tokenizer | None, *, num_texts: int = 1) -> Request:
    """Return the request with as many tokens as one message can hold with their scores and those of the prompt;
    `max_tokens` of the caller's own stays. A stream is bound like a single answer: what a slow reader is sent has all
    that gathered. `num_texts`: how often the text is in it, as a whole and in parts. What an output continues from
    counts as if it were sent, so that it ends where the uncut one does.

    Raise InvalidRequest where the prompt's scores, max_tokens or min_tokens do not fit.
    """
    scores, stop, num_outputs = request.logprobs, request.stop, request.num_outputs
    bytes_per_id = BYTES_PER_ID + (0 if tokenizer is None else tokenizer.max_token_bytes)
    room = max_message_bytes - BYTES_PER_OUTPUT * (1 + num_outputs)
    if scores.num_prompt_records:
        # Beside its scores a position has an id and text, which are no longer than one more.
        prompt_bytes = len(request.prompt_ids) * (1 + scores.num_prompt_records) * bytes_per_id
        what = f"{scores.num_prompt_records} of each of {len(request.prompt_ids)} prompt tokens"
        _check("output.prompt_logprobs", what, prompt_bytes, room)
        room -= prompt_bytes
    if not scores.num_records:
        return request
    token_bytes = num_outputs * (num_texts + scores.num_records) * bytes_per_id
    is_asked = stop.limit_reason is FinishReason.MAX_TOKENS
    least = max(stop.max_tokens if is_asked else stop.min_tokens, 1)
    field = "output.logprobs" if scores.num_logprobs >= 0 else "output.score_token_ids"
    _check(field, f"{scores.num_records} of each of {num_outputs} x {least} output tokens", least * token_bytes, room)
    max_tokens = min(stop.max_tokens, room // token_bytes)
    return msgspec.structs.replace(request, stop=msgspec.structs.replace(stop, max_tokens=max_tokens))


def _check(field: str, what: str, needed: int, room: int) -> None:
    if needed > room:
        message = f"{field}: the scores, {what}, may take {needed} bytes; {max(room, 0)} are left in a message"
        raise InvalidRequest(message, field=field, needed=needed, limit=max(room, 0))
