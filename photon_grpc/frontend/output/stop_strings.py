"""The search for stop strings, character by character, so that tokens, frames and messages do not affect the result.

The match that ends first counts; of several that end at the same character, the longest. Text that may be the beginning
of a stop string is held back.
"""

from __future__ import annotations


class StopStrings:
    """The stop strings of one request, prepared for Knuth-Morris-Pratt search and shared by its outputs."""

    __slots__ = ("fallbacks", "first_chars", "texts")

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        self.fallbacks = tuple(_fallbacks(text) for text in self.texts)
        self.first_chars = frozenset(text[0] for text in self.texts)


class StopMatcher:
    """The search of one output."""

    __slots__ = ("_held", "_include", "_matched_lengths", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include_stop_in_text: bool = False) -> None:
        self._stops = stops
        self._include = include_stop_in_text
        #: How many first characters of each stop string the text ends with.
        self._matched_lengths = [0] * len(stops.texts)
        self._held = ""
        #: The stop string that ended the output.
        self.matched: str | None = None

    def push(self, text: str, may_end: bool) -> str:
        """Return the text that `text` releases; if `may_end`, a stop string in it sets `matched` and cuts it."""
        if not self._held and self._stops.first_chars.isdisjoint(text):
            return text
        buffer = self._held + text
        for i, char in enumerate(text, start=len(self._held)):
            found = self._advance(char)
            if found and may_end:
                self.matched = found
                self._held = ""
                return buffer[: i + 1 if self._include else i + 1 - len(found)]
        cut = len(buffer) - max(self._matched_lengths)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """Return the text that is held back, after the output ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str:
        found = ""
        lengths = self._matched_lengths
        for k, text in enumerate(self._stops.texts):
            fallback = self._stops.fallbacks[k]
            n = lengths[k]
            while n and text[n] != char:
                n = fallback[n - 1]
            if text[n] == char:
                n += 1
            if n == len(text):
                found = text if n > len(found) else found
                n = fallback[n - 1]
            lengths[k] = n
        return found


def _fallbacks(text: str) -> list[int]:
    """Return for each prefix the length of its longest proper suffix that is a prefix of `text`."""
    lengths = [0] * len(text)
    n = 0
    for i in range(1, len(text)):
        while n and text[n] != text[i]:
            n = lengths[n - 1]
        if text[n] == text[i]:
            n += 1
        lengths[i] = n
    return lengths
