"""The size of an input before it is tokenized."""

from __future__ import annotations

from collections.abc import Sequence

from photon_grpc.core.ask import ChatInput, IdsInput, TextInput
from photon_grpc.frontend.input.chat_json import json_fields, texts_of

#: Limits of an input for the front end's threads; it takes at most about 40 ms of one core.
_SMALL_BYTES = 32 * 1024
_SMALL_JSON_CHARS = 8 * 1024
_SMALL_NUM_MESSAGES = 128
_SMALL_NUM_IDS = 8 * 1024
#: An estimate, about right for English.
_CHARS_PER_TOKEN = 4


def is_small(input: TextInput | IdsInput | ChatInput) -> bool:
    """Return whether an input may be encoded in a thread, where it cannot be cancelled and often holds the GIL."""
    if isinstance(input, IdsInput):
        return True
    if isinstance(input, TextInput):
        return _is_short((input.text,))
    if len(input.messages) > _SMALL_NUM_MESSAGES:
        return False
    json = [text for _, text in json_fields(input)]
    return sum(map(len, json)) <= _SMALL_JSON_CHARS and _is_short([*texts_of(input), *json])


def are_few(token_ids: Sequence[int]) -> bool:
    """Return whether ids are few enough to be decoded in a thread."""
    return len(token_ids) <= _SMALL_NUM_IDS


def num_chars(input: TextInput | ChatInput) -> int:
    """Return the characters of an input, which are about its bytes."""
    if isinstance(input, TextInput):
        return len(input.text)
    json = sum([len(text) for _, text in json_fields(input)]) if input.has_tools else 0
    return _message_chars(input) + json


def estimate_tokens(input: TextInput | IdsInput | ChatInput | None, max_model_len: int) -> int:
    """Estimate the tokens of a prompt: exact for ids, else a quarter of the characters, at most the context."""
    if isinstance(input, IdsInput):
        return len(input.token_ids)
    count = len(input.text) if isinstance(input, TextInput) else _message_chars(input) if input else 0
    return min(count // _CHARS_PER_TOKEN + 1, max_model_len)


def _message_chars(chat: ChatInput) -> int:
    return sum([len(message.content) for message in chat.messages])


def _is_short(texts: Sequence[str]) -> bool:
    if sum(map(len, texts)) > _SMALL_BYTES:
        return False
    return len("".join(texts).encode(errors="surrogatepass")) <= _SMALL_BYTES
