"""A lower bound of the characters that a regular expression matches, 0 if the expression is not understood."""

from __future__ import annotations

import re

#: Longer expressions are not read.
_MAX_CHARS = 4_000
_REPETITION = re.compile(r"(?:([*?])|(\+)|\{([0-9]+)(?:,[0-9]*)?\})\??")
#: The beginning of a group; flags alone match nothing. Flag `x` is left out, since it changes what white space means.
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[a-wyzA-Z-]*:))?(?!\?)")
_FLAGS = re.compile(r"\(\?[a-wyzA-Z-]+\)")
_NOTHING = re.compile(r"[\^$]|\\[bBAz](?!\{)")
#: A code point, a class of Unicode, or any other escape of one character; `\<` and the like match nothing.
_ESCAPED = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[pP]\w|[^xuUpPbBAzQ<>])")
_IN_CLASS = re.compile(r"\\.|[^\[\]\\]|(\[\^?\]?)|(\])", re.DOTALL)


class _NotUnderstood(Exception):
    pass


def least_chars(pattern: str) -> int:
    """Return the bound of a pattern in the syntax of Rust's `regex`."""
    if len(pattern) > _MAX_CHARS:
        return 0
    try:
        least, end = _alternatives(pattern, 0)
    except (_NotUnderstood, RecursionError):
        return 0
    return least if end == len(pattern) else 0


def _alternatives(pattern: str, at: int) -> tuple[int, int]:
    """Return the bound of the alternatives from `at` on, and the place after them."""
    ways = [0]
    while at < len(pattern) and pattern[at] != ")":
        if pattern[at] == "|":
            ways.append(0)
            at += 1
        else:
            least, at = _repeated(pattern, at)
            ways[-1] += least
    return min(ways), at


def _repeated(pattern: str, at: int) -> tuple[int, int]:
    least, at = _atom(pattern, at)
    while found := _REPETITION.match(pattern, at):
        least *= 0 if found[1] else 1 if found[2] else int(found[3])
        at = found.end()
    return least, at


def _atom(pattern: str, at: int) -> tuple[int, int]:
    if found := _FLAGS.match(pattern, at) or _NOTHING.match(pattern, at):
        return 0, found.end()
    if found := _GROUP.match(pattern, at):
        least, end = _alternatives(pattern, found.end())
        if end == len(pattern):
            raise _NotUnderstood
        return least, end + 1
    if found := _ESCAPED.match(pattern, at):
        return 1, found.end()
    if pattern[at] == "[":
        return 1, _class_end(pattern, at)
    if pattern[at] in "(\\{*+?":
        raise _NotUnderstood
    return 1, at + 1


def _class_end(pattern: str, at: int) -> int:
    """Return the place after a class, which may hold others."""
    depth = 0
    while found := _IN_CLASS.match(pattern, at):
        depth += bool(found[1]) - bool(found[2])
        at = found.end()
        if not depth:
            return at
    raise _NotUnderstood
