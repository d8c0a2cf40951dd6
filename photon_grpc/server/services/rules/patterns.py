"""Patterns of RE2, which may match anywhere in a text, as expressions of whole texts."""

from __future__ import annotations

from collections.abc import Iterator

#: RE2's classes are of ASCII.
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\f\r "}
_QUANTIFIERS = "*+?}"
#: Of sets in other dialects.
_SET_OPERATORS = ("&&", "--", "~~")


class _Inexpressible(Exception):
    """Raised for what no expression of a whole text says."""


def whole_text(pattern: str, anything: str) -> str:
    """Return an expression of the texts in which `pattern` matches; "" if there is none known.

    `anything` is an expression of any text.
    """
    try:
        branches = list(_branches(pattern))
    except (_Inexpressible, IndexError):
        return ""
    return "|".join(
        [("" if begins else anything) + f"({body})" + ("" if ends else anything) for body, begins, ends in branches]
    )


def _branches(pattern: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield the alternatives, and whether each begins and ends with the text. Raise _Inexpressible."""
    body: list[str] = []
    begins = ends = False
    depth = 0
    for part in _parts(pattern):
        depth += (part in ("(", "(?:")) - (part == ")")
        if part == "|" and not depth:
            yield "".join(body), begins, ends
            body, begins, ends = [], False, False
        elif ends:
            raise _Inexpressible
        elif part == "^":
            if body or depth:
                raise _Inexpressible
            begins = True
        elif part == "$":
            if depth:
                raise _Inexpressible
            ends = True
        elif part == "?" and body and body[-1][-1:] in _QUANTIFIERS and body[-1][:1] != "\\":
            continue  # lazy, which changes no match of a whole text
        else:
            body.append(part)
    if depth:
        raise _Inexpressible
    yield "".join(body), begins, ends


def _parts(pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        part, at = _part(pattern, at)
        yield part


def _part(pattern: str, at: int) -> tuple[str, int]:
    char = pattern[at]
    if char == "\\":
        return _escape(pattern, at, is_in_class=False)
    if char == "[":
        return _class(pattern, at)
    if char == "{":
        end = pattern.index("}", at) + 1 if "}" in pattern[at:] else at + 1
        return (pattern[at:end], end) if end > at + 1 else (r"\{", end)
    if pattern.startswith("(?", at):
        if not pattern.startswith("(?:", at):
            raise _Inexpressible  # flags, names
        return "(?:", at + 3
    if char < " ":
        raise _Inexpressible
    return (r"\/" if char == "/" else char), at + 1


def _escape(pattern: str, at: int, *, is_in_class: bool) -> tuple[str, int]:
    char = pattern[at + 1]
    if char in _CLASSES:
        inner = _CLASSES[char]
        return (inner if is_in_class else f"[{inner}]"), at + 2
    if char.lower() in _CLASSES and not is_in_class:
        return f"[^{_CLASSES[char.lower()]}]", at + 2
    if char in "Az" and not is_in_class:
        return ("^" if char == "A" else "$"), at + 2
    if char.isalnum():
        raise _Inexpressible
    return f"\\{char}", at + 2


def _class(pattern: str, at: int) -> tuple[str, int]:
    begin = 2 if pattern.startswith("[^", at) else 1
    found, at = [pattern[at : at + begin]], at + begin
    is_first = True
    while is_first or pattern[at] != "]":
        is_first = False
        if pattern.startswith("[:", at):
            end = pattern.index(":]", at) + 2
            part, at = pattern[at:end], end
        elif pattern.startswith(_SET_OPERATORS, at):
            raise _Inexpressible
        elif pattern[at] == "\\":
            part, at = _escape(pattern, at, is_in_class=True)
        else:
            part, at = (f"\\{pattern[at]}" if pattern[at] in "[]/" else pattern[at]), at + 1
        found.append(part)
    return "".join([*found, "]"]), at + 1
