"""JSON objects with no key twice, which a grammar cannot say: tokens that would repeat one are taken from masks.

Follows the bytes of an output whose grammar is JSON without white space. A token is tried without being taken, and
undone by going back to the state before it. A token costs the same however many keys an object has.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import llguidance
import numpy as np

_QUOTE, _ESCAPE, _COMMA = b'"\\,'
_BEGINNINGS, _ENDS = b"{[", b"}]"
_NUMBER = re.compile(rb"-?[0-9]*")
#: As an integer key is written.
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)")
#: Beginnings of tokens that go on with an integer.
_DIGITS = tuple(bytes([byte]) for byte in b"-0123456789")
#: Digits of integer keys: of 32 and of 64 bits.
_KEY_DIGITS = (9, 18)


class Keys:
    """The keys of one object, in their order. States share it, each with the number of keys that it knows; those behind
    the newest state's are of tokens that were tried or undone, and go."""

    __slots__ = ("_added", "_beginnings", "_known")

    def __init__(self) -> None:
        self._added: list[bytes] = []
        self._known: set[bytes] = set()
        #: Of integer keys: how many begin so.
        self._beginnings: Counter[bytes] = Counter()

    def has(self, key: bytes, num_known: int) -> bool:
        self._go_back(num_known)
        return key in self._known

    def num_with(self, beginning: bytes, num_known: int) -> int:
        """Integer keys that begin so."""
        self._go_back(num_known)
        return self._beginnings[beginning]

    def add(self, key: bytes) -> None:
        """Requires that it is not there."""
        self._added.append(key)
        self._known.add(key)
        self._count(key, 1)

    def _go_back(self, num_known: int) -> None:
        while len(self._added) > num_known:
            key = self._added.pop()
            self._known.remove(key)
            self._count(key, -1)

    def _count(self, key: bytes, sign: int) -> None:
        if len(key) <= _KEY_DIGITS[-1] + 2 and _INTEGER.fullmatch(key):
            for end in range(1, len(key) + 1):
                self._beginnings[key[:end]] += sign


class KeyState(NamedTuple):
    """The place that an output has reached in its text."""

    #: Keys of the objects that are open and how many of them there are, None for arrays; innermost last.
    open: tuple[tuple[Keys, int] | None, ...] = ()
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
                    keys, num_known = open[-1] or (Keys(), 0)
                    if keys.has(key, num_known):
                        return None
                    keys.add(key)
                    open, is_key, key = (*open[:-1], (keys, num_known + 1)), False, b""
        elif byte == _QUOTE:
            in_string = True
        elif byte in _BEGINNINGS:
            is_key = byte == _BEGINNINGS[0]
            open = (*open, (Keys(), 0) if is_key else None)
        elif byte in _ENDS:
            open, is_key = open[:-1], False
        elif byte == _COMMA:
            is_key = bool(open) and open[-1] is not None
    if in_string and is_key and open[-1] is not None and _is_used_up(key, *open[-1]):
        return None
    return KeyState(open, in_string, is_escaped, is_key, key)


def _is_used_up(beginning: bytes, keys: Keys, num_known: int) -> bool:
    """Return whether all integer keys with this beginning may be taken: other strings go on, they cannot."""
    if not num_known or not _NUMBER.fullmatch(beginning):
        return False
    num_digits = len(beginning.lstrip(b"-"))
    most = next((digits for digits in _KEY_DIGITS if num_digits <= digits), 0)
    if not num_digits or not most:
        return False
    num_possible = 1 if beginning == b"0" else sum([10**more for more in range(most - num_digits + 1)])
    return keys.num_with(beginning, num_known) >= num_possible


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
