"""The schemas (`%json {...}`) within a caller's Lark grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

#: Comments, strings and regular expressions, which may hold anything. An unclosed one extends to the end and is refused
#: by the compiler.
TEXT = r"""(?s:#[^\n]*|//[^\n]*|"(?:[^"\\]+|\\.)*"?|/(?:[^/\\]+|\\.)*/?)"""
_TEXT_OR_SCHEMA = re.compile(rf"{TEXT}|(%json\s*)")
_DECODER = json.JSONDecoder()


def lark_schemas(grammar: str) -> list[str]:
    return [grammar[start:end] for start, end in _places(grammar)]


def with_schemas(grammar: str, rewritten: Callable[[str], str]) -> str:
    """Return the grammar with every schema `rewritten`."""
    done, parts = 0, []
    for start, end in _places(grammar):
        parts += [grammar[done:start], rewritten(grammar[start:end])]
        done = end
    return "".join([*parts, grammar[done:]])


def _places(grammar: str) -> Iterator[tuple[int, int]]:
    at = 0
    while "%json" in grammar and (found := _TEXT_OR_SCHEMA.search(grammar, at)):
        at = found.end()
        if found[1]:
            try:
                _, end = _DECODER.raw_decode(grammar, at)
            except (ValueError, RecursionError):  # the compiler reports what is wrong with it
                return
            yield at, end
            at = end
