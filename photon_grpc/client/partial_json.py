"""A message's JSON while it arrives, completed at any time to valid JSON of what is known."""

from __future__ import annotations

from typing import Any, Self

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

#: Messages whose JSON has no declared fields.
_ANY_JSON = frozenset(f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue", "StringValue"))
_UNICODE_CHARS = len("\\ud83d")


class PartialJson:
    """A reader of the JSON of one message in pieces, each character once.

    A value counts once it is complete: a number with the character after it, an object or list with its first bracket.
    The string of a text field counts as far as it is written; other strings (enums, 64-bit numbers, timestamps) only
    when they end.
    """

    def __init__(self, message_type: type[Message]) -> None:
        self._text = ""
        self._root = _of_message(message_type.DESCRIPTOR)
        #: The open objects and lists, the innermost last.
        self._open: list[_Level] = []
        #: Position up to which all values are complete, and the closing brackets that are missing there.
        self._safe, self._safe_closers = 0, ""
        #: Position of the current string's content; None outside a string.
        self._string_start: int | None = None
        #: The current, incomplete escape.
        self._escape = ""

    def add(self, piece: str) -> None:
        start = len(self._text)
        self._text += piece
        for place, character in enumerate(piece, start):
            if self._string_start is None:
                self._read(character, place)
            else:
                self._read_in_string(character, place)

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text

    @property
    def num_complete(self) -> int:
        """The number of characters up to which every value is complete."""
        return self._safe

    def complete(self) -> str:
        """Return JSON of what is known; "" before the first bracket."""
        if self._grows():
            return self._text[: len(self._text) - len(self._escape)] + '"' + self._closers()
        return self._text[: self._safe] + self._safe_closers

    def _read(self, character: str, place: int) -> None:
        if character == '"':
            self._string_start = place + 1
        elif character in "{[":
            self._open.append(_Level(character, self._open[-1].shape if self._open else self._root))
            self._mark(place + 1)
        elif character in "}]":
            self._open.pop()
            self._mark(place + 1)
        elif character == ",":
            self._mark(place)
            self._open[-1].wants_key = self._open[-1].closer == "}"
        elif character == ":":
            self._open[-1].wants_key = False

    def _read_in_string(self, character: str, place: int) -> None:
        if len(self._escape) == _UNICODE_CHARS and character != "\\":
            # Half of a surrogate pair without the other half.
            self._escape = ""
        if self._escape or character == "\\":
            self._escape += character
            if _is_complete_escape(self._escape):
                self._escape = ""
        elif character == '"':
            self._end_string(place)

    def _end_string(self, place: int) -> None:
        level = self._open[-1]
        if level.wants_key:
            level.shape = level.container.member(self._text[self._string_start : place])
        else:
            self._mark(place + 1)
        self._string_start = None

    def _grows(self) -> bool:
        if self._string_start is None:
            return False
        return not self._open[-1].wants_key and self._open[-1].shape.grows

    def _mark(self, place: int) -> None:
        self._safe, self._safe_closers = place, self._closers()

    def _closers(self) -> str:
        return "".join(level.closer for level in reversed(self._open))


class _Shape:
    """The form of a value, by its field."""

    def __init__(self, *, message: Any = None, each: Self | None = None, grows: bool = False) -> None:
        #: The fields of an object.
        self._fields = {} if message is None else {field.json_name: field for field in message.fields}
        #: The form of the items of a list or map.
        self.each = each
        #: Whether an incomplete string is useful.
        self.grows = grows

    def member(self, key: str) -> _Shape:
        field = self._fields.get(key)
        return _of_field(field) if field is not None else self.each or _OPAQUE


class _Level:
    """An open object or list. `shape` is that of its items or, for an object, of the value of the last key."""

    def __init__(self, bracket: str, container: _Shape) -> None:
        self.closer = "}" if bracket == "{" else "]"
        self.container = container
        self.shape = container.each or _OPAQUE
        self.wants_key = bracket == "{"


_OPAQUE = _Shape()
_TEXT = _Shape(grows=True)
_ANYTHING = _Shape(grows=True)
_ANYTHING.each = _ANYTHING


def _of_message(message: Any) -> _Shape:
    if message.full_name in _ANY_JSON:
        return _ANYTHING
    return _OPAQUE if message.full_name.startswith("google.protobuf.") else _Shape(message=message)


def _of_field(field: FieldDescriptor) -> _Shape:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _Shape(each=_of_value(field.message_type.fields_by_name["value"]))
    return _Shape(each=_of_value(field)) if field.is_repeated else _of_value(field)


def _of_value(field: FieldDescriptor) -> _Shape:
    if field.message_type is not None:
        return _of_message(field.message_type)
    return _TEXT if field.type == field.TYPE_STRING else _OPAQUE


def _is_complete_escape(escape: str) -> bool:
    """Return whether an escape is complete; a surrogate is complete with its other half."""
    if escape[1:2] != "u":
        return len(escape) == 2
    is_high = escape[2:3] in ("d", "D") and escape[3:4] in tuple("89abAB")
    return len(escape) == (2 * _UNICODE_CHARS if is_high else _UNICODE_CHARS)
