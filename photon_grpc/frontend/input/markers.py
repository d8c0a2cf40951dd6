"""Spellings of special tokens: how they are found in text, and how untrusted text is kept from spelling one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator

#: Stand-in characters are chosen at random in this private-use plane, so that no caller can know them in advance.
_FIRST_STAND_IN = 0xF0000
_NUM_STAND_INS = 0xFFFE
#: Characters of the longest strings that are cached.
_SHORT = 32


class Markers:
    """The spellings of a tokenizer's special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=len, reverse=True))
        spellings = "|".join(re.escape(text) for text in self.texts)
        # Longest first: the regular expression takes the first alternative that fits.
        self._exact = re.compile(spellings)
        self._any_case = re.compile(spellings, re.IGNORECASE)
        self._first_chars = tuple(sorted({text[0] for text in self.texts}))
        self._first_chars_any_case = tuple(
            sorted({c for text in self.texts for c in (text[0], text[0].lower(), text[0].upper())})
        )
        # Text without any of these is harmless.
        self._risky_chars = tuple(
            {*self._first_chars_any_case, *(c for text in self.texts for c in text if not c.isalnum())}
        )
        self._heads = frozenset(text[:i].lower() for text in self.texts for i in range(1, len(text)))
        self._tails = frozenset(text[i:].lower() for text in self.texts for i in range(1, len(text)))
        self._longest = max((len(text) for text in self.texts), default=0)

    def mark(self, text: str, sign: str) -> str:
        """Return `text` with `sign` before every special token's exact spelling (leftmost, longest)."""
        pieces: list[str] = []
        done = 0
        for start in _positions(text, self._first_chars):
            match = self._exact.match(text, start) if start >= done else None
            if match is not None:
                pieces += (text[done:start], sign, match.group())
                done = match.end()
        return "".join(pieces) + text[done:]

    def risks(self, text: str) -> list[int]:
        """Return the positions to escape so that no special token can be spelled with a part of `text`.

        In a spelling, in upper or lower case since templates change that, these are the first character and all that
        are neither letter nor digit. Characters that are neither are escaped, too, where a spelling may continue beyond
        `text`, even after a template has stripped white space there. Letters and digits at the borders stay, since
        templates compare roles and keys.
        """
        if not any(char in text for char in self._risky_chars):
            return []
        found: set[int] = set()
        for start in _positions(text, self._first_chars_any_case):
            match = self._any_case.match(text, start)
            if match is not None:
                found.add(start)
                found.update(_signs(text, start, match.end()))
        found.update(self._risks_at_end(text, len(text.rstrip())))
        found.update(self._risks_at_start(text, len(text) - len(text.lstrip())))
        return sorted(found)

    def _risks_at_end(self, text: str, end: int) -> Iterator[int]:
        for i in range(max(0, end - self._longest + 1), end):
            if text[i:end].lower() in self._heads:
                yield from _signs(text, i, end)

    def _risks_at_start(self, text: str, start: int) -> Iterator[int]:
        for end in range(start + 1, min(start + self._longest, len(text) + 1)):
            if text[start:end].lower() in self._tails:
                yield from _signs(text, start, end)


class SpecialTokenEscaper:
    """Replaces risky characters of untrusted strings by stand-ins that none of them has, and restores them."""

    def __init__(self, markers: Markers, strings: Iterable[str]) -> None:
        self._markers = markers
        self._strings = tuple(strings)
        self._stand_ins: dict[str, str] = {}
        # Roles and keys recur.
        self._escaped: dict[str, str] = {}

    def escape(self, text: str) -> str:
        if len(text) > _SHORT:
            return self._escape(text)
        escaped = self._escaped.get(text)
        if escaped is None:
            escaped = self._escaped[text] = self._escape(text)
        return escaped

    def _escape(self, text: str) -> str:
        risks = self._markers.risks(text)
        if not risks:
            return text
        pieces: list[str] = []
        done = 0
        for i in risks:
            pieces += (text[done:i], self._stand_in(text[i]))
            done = i + 1
        return "".join(pieces) + text[done:]

    def unescape(self, text: str) -> str:
        for char, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, char)
        return text

    def _stand_in(self, char: str) -> str:
        if char not in self._stand_ins:
            self._stand_ins[char] = self._unused()
        return self._stand_ins[char]

    def _unused(self) -> str:
        while True:
            char = chr(_FIRST_STAND_IN + secrets.randbelow(_NUM_STAND_INS))
            if char not in self._stand_ins.values() and not any(char in text for text in self._strings):
                return char


def _signs(text: str, start: int, end: int) -> list[int]:
    """Return the positions in text[start:end] that are neither letter nor digit."""
    return [i for i in range(start, end) if not text[i].isalnum()]


def _positions(text: str, chars: tuple[str, ...]) -> Iterator[int]:
    """Yield the positions of any of `chars`, ascending. Steps are short, so that other threads get the GIL."""
    if len(chars) == 1:
        yield from _positions_of(text, chars[0])
    elif any(char in text for char in chars):
        for match in re.compile("[" + "".join(re.escape(char) for char in chars) + "]").finditer(text):
            yield match.start()


def _positions_of(text: str, char: str) -> Iterator[int]:
    at = text.find(char)
    while at >= 0:
        yield at
        at = text.find(char, at + 1)
