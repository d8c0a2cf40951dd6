"""The search for stop strings, character by character, so that tokens, frames and messages do not affect the result.

The match that ends first counts; of several that end at the same character, the longest. Text that may be the beginning
of a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class StopStrings:
    """The stop strings of one request as an Aho-Corasick automaton, shared by its outputs.

    A state is the longest beginning of a stop string that the text ends with. States are created when a text reaches
    them, so that neither the number nor the length of stop strings costs anything before.
    """

    __slots__ = ("depths", "first_chars", "found", "_after", "_fallbacks")

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.first_chars = frozenset(text[0] for text in texts)
        #: By state: its characters, and the longest stop string that a text ends with there.
        self.depths: list[int] = []
        self.found: list[str] = []
        #: By state: what follows each character that a stop string goes on with, a state or, until a text reaches it,
        #: these stop strings.
        self._after: list[dict[str, Any]] = []
        #: By state: the state of its longest proper suffix.
        self._fallbacks: list[int] = []
        self._create(0, 0, texts)

    def next(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while True:
            after = self._after[state].get(char)
            if after is not None:
                return after if isinstance(after, int) else self._reach(state, char, after)
            if not state:
                return 0
            state = self._fallbacks[state]

    def _reach(self, state: int, char: str, texts: list[str]) -> int:
        """Create the state after `char`. The calls within it are at most as many as there are stop strings."""
        fallback = self.next(self._fallbacks[state], char) if state else 0
        self._after[state][char] = after = self._create(self.depths[state] + 1, fallback, texts)
        return after

    def _create(self, depth: int, fallback: int, texts: Iterable[str]) -> int:
        """Create the state of the first `depth` characters of `texts`."""
        after: dict[str, Any] = {}
        found = self.found[fallback] if depth else ""
        for text in texts:
            if len(text) == depth:
                found = text
            else:
                after.setdefault(text[depth], []).append(text)
        self.depths.append(depth)
        self.found.append(found)
        self._after.append(after)
        self._fallbacks.append(fallback)
        return len(self.depths) - 1

    def num_held(self, state: int) -> int:
        """Return how many characters at the end of the text may begin a stop string that is longer."""
        while state and not self._after[state]:
            state = self._fallbacks[state]
        return self.depths[state]


class StopMatcher:
    """The search of one output."""

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include_stop_in_text: bool = False) -> None:
        self._stops = stops
        self._include = include_stop_in_text
        self._state = 0
        self._held = ""
        #: The stop string that ended the output.
        self.matched: str | None = None

    def push(self, text: str, may_end: bool) -> str:
        """Return the text that `text` releases; if `may_end`, a stop string in it sets `matched` and cuts it."""
        stops, state = self._stops, self._state
        if not state and stops.first_chars.isdisjoint(text):
            return text
        buffer = self._held + text
        for i, char in enumerate(text, start=len(self._held)):
            state = stops.next(state, char)
            found = stops.found[state]
            if found and may_end:
                self.matched = found
                self._held = ""
                return buffer[: i + 1 if self._include else i + 1 - len(found)]
        self._state = state
        cut = len(buffer) - stops.num_held(state)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """Return the text that is held back, after the output ended for another reason."""
        held, self._held = self._held, ""
        return held
