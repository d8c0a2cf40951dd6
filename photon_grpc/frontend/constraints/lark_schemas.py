"""The schemas within a caller's Lark grammar, `%json {...}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

#: Comments, texts and expressions, which may look like anything. What is not closed goes on to the end, and the
#: compiler refuses it.
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
            except (ValueError, RecursionError):  # the compiler says what is wrong with it
                return
            yield at, end
            at = end
