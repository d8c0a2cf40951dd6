"""JSON objects with no key twice, which a grammar cannot say: tokens that would repeat one are taken from masks.

Follows the bytes of an output whose grammar is JSON without white space. States are values, so that a token is tried
without being taken, and undone by going back to the state before it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import llguidance
import numpy as np

_QUOTE, _ESCAPE, _COMMA = b'"\\,'
_BEGINNINGS, _ENDS = b"{[", b"}]"
_NUMBER = re.compile(rb"-?[0-9]*")
#: Beginnings of tokens that go on with an integer.
_DIGITS = tuple(bytes([byte]) for byte in b"-0123456789")
#: Digits of integer keys: of 32 and of 64 bits.
_KEY_DIGITS = (9, 18)


class KeyState(NamedTuple):
    """The place that an output has reached in its text."""

    #: Keys of the objects that are open, None for arrays; innermost last.
    open: tuple[frozenset[bytes] | None, ...] = ()
    in_string: bool = False
    is_escaped: bool = False
    #: The string, or the next one, is a key.
    is_key: bool = False
    #: That key up to here.
    key: bytes = b""


def after(state: KeyState, token: bytes) -> KeyState | None:
    """The state behind a token; None where an object gets a key twice, or one with which it could not go on."""
    open, in_string, is_escaped, is_key, key = state
    for at, byte in enumerate(token):
        if in_string:
            if is_key and (byte != _QUOTE or is_escaped):
                key += token[at : at + 1]
            if is_escaped:
                is_escaped = False
            elif byte == _ESCAPE:
                is_escaped = True
            elif byte == _QUOTE:
                in_string = False
                if is_key:
                    keys = open[-1] or frozenset()
                    if key in keys:
                        return None
                    open, is_key, key = (*open[:-1], keys | {key}), False, b""
        elif byte == _QUOTE:
            in_string = True
        elif byte in _BEGINNINGS:
            is_key = byte == _BEGINNINGS[0]
            open = (*open, frozenset() if is_key else None)
        elif byte in _ENDS:
            open, is_key = open[:-1], False
        elif byte == _COMMA:
            is_key = bool(open) and open[-1] is not None
    if in_string and is_key and _is_used_up(key, open[-1] or frozenset()):
        return None
    return KeyState(open, in_string, is_escaped, is_key, key)


def _is_used_up(beginning: bytes, keys: frozenset[bytes]) -> bool:
    """Return whether all integer keys with this beginning may be taken: other strings go on, they cannot."""
    if not keys or not _NUMBER.fullmatch(beginning):
        return False
    num_digits = len(beginning.lstrip(b"-"))
    most = next((digits for digits in _KEY_DIGITS if num_digits <= digits), 0)
    if not num_digits or not most:
        return False
    num_possible = 1 if beginning == b"0" else sum([10**more for more in range(most - num_digits + 1)])
    return sum([key.startswith(beginning) for key in keys]) >= num_possible


class KeyTokens:
    """The tokens of a vocabulary that can end a key, or go on with an integer one. Takes some 0.1 s for 128,000."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self.bytes = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
        ids = range(tokenizer.vocab_size)
        self._quotes = np.array([id for id in ids if b'"' in self.bytes[id]], np.int64)
        self._digits = np.array([id for id in ids if self.bytes[id][:1] in _DIGITS], np.int64)

    def forbid(self, state: KeyState, mask: memoryview) -> None:
        """Takes out of `mask` what `after` refuses."""
        bits = np.frombuffer(mask, np.uint8)
        is_number = state.in_string and state.is_key and _NUMBER.fullmatch(state.key) is not None
        for ids in (self._quotes, self._digits) if is_number else (self._quotes,):
            for token_id in ids[bits[ids >> 3] >> (ids & 7) & 1 == 1].tolist():
                if after(state, self.bytes[token_id]) is None:
                    mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
