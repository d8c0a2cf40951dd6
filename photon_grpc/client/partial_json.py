"""A JSON object on its way in, seen at any time as an object of what is complete."""

from __future__ import annotations

_CLOSERS = {"{": "}", "[": "]"}


class PartialJson:
    """Takes the pieces of a text that is one JSON value. Values count once they are complete: a number with what
    follows it, a string with its last quote; an object or a list with its first bracket."""

    def __init__(self) -> None:
        self._text = ""
        #: Brackets that are open here, as those that close them, and whether a key comes next.
        self._open = ""
        self._wants_key = False
        self._is_in_string = self._is_escaped = False
        #: Up to here all is complete but for these brackets.
        self._safe = 0
        self._safe_open = ""

    def add(self, piece: str) -> bool:
        """Whether more is complete than before."""
        before = self._safe
        for place, character in enumerate(piece, len(self._text)):
            self._read(character, place)
        self._text += piece
        return self._safe > before

    def complete(self) -> str:
        """JSON of what is complete; empty before the first bracket."""
        return self._text[: self._safe] + self._safe_open[::-1]

    def _read(self, character: str, place: int) -> None:
        if self._is_in_string:
            self._read_in_string(character, place)
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._open += _CLOSERS[character]
            self._wants_key = character == "{"
            self._mark(place + 1)
        elif character in "}]":
            self._open = self._open[:-1]
            self._mark(place + 1)
        elif character == ",":
            self._mark(place)
            self._wants_key = self._open.endswith("}")
        elif character == ":":
            self._wants_key = False

    def _read_in_string(self, character: str, place: int) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
            if not self._wants_key:
                self._mark(place + 1)

    def _mark(self, place: int) -> None:
        self._safe, self._safe_open = place, self._open
