"""What a model writes: whether completed functions are Python, and how much of a longer text is a line again.

Knows texts; does not know how they are continued.
"""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass

from .documents import definitions, parse, source_of

NUM_PROMPTS = 100
MIN_BODY_LINES = 2
MAX_HEAD_LINES = 25
OPENING_LINES = 12


@dataclass(frozen=True)
class Continuation:
    """The text after `prompt`; `has_ended` where the model said so, not the limit of tokens."""

    prompt: str
    text: str
    has_ended: bool


def function_prompts(sources: list[str]) -> list[str]:
    """Signature and docstring of functions of the module level, the same ones each time, at most NUM_PROMPTS."""
    found = [
        prompt
        for source in sources
        for node, is_method in definitions(ast.parse(source))
        if not is_method and (prompt := _signature_and_docstring(node, source.split("\n")))
    ]
    random.Random(0).shuffle(found)
    return found[:NUM_PROMPTS]


def _signature_and_docstring(node: ast.stmt, lines: list[str]) -> str | None:
    """None where `node` is no plain function with a docstring and a body after it."""
    if not isinstance(node, ast.FunctionDef) or node.decorator_list or not ast.get_docstring(node):
        return None
    text = source_of(node, lines).split("\n")
    num_head = (node.body[0].end_lineno or 0) - node.lineno + 1
    is_fit = num_head <= MAX_HEAD_LINES and len(text) - num_head > MIN_BODY_LINES
    return "\n".join(text[:num_head]) if is_fit else None


def opening_prompts(sources: list[str]) -> list[str]:
    """The first lines of files, the same ones each time, at most NUM_PROMPTS."""
    lines = [source.split("\n") for source in sources if source.count("\n") > 3 * OPENING_LINES]
    found = ["\n".join(head[:OPENING_LINES]) for head in lines]
    random.Random(0).shuffle(found)
    return found[:NUM_PROMPTS]


def body_lines(continuation: Continuation) -> list[str]:
    """The lines that continue the function that the prompt began, from the one that the prompt broke off.

    They end before the first line at the left margin, or with the text; a line that the limit of tokens cut off is left
    out.
    """
    first, *lines = continuation.text.split("\n")
    for at, line in enumerate(lines):
        if line[:1].strip():
            return [first, *lines[:at]]
    return [first, *lines] if continuation.has_ended else [first, *lines][:-1]


def is_python(continuation: Continuation) -> bool:
    """The completed function parses, and something was added to it."""
    body = "\n".join(body_lines(continuation))
    return bool(body.strip()) and parse(continuation.prompt + body + "\n") is not None


def mean_body_lines(continuations: list[Continuation]) -> float:
    """Lines that say something, so that a model that writes only `pass` does not do well unseen."""
    return sum(sum(map(bool, map(str.strip, body_lines(item)))) for item in continuations) / max(len(continuations), 1)


def repeated_share(continuations: list[Continuation]) -> float:
    """The share of the lines with a word in them that stood in the same text before, prompt included."""
    num_lines = num_repeated = 0
    for continuation in continuations:
        seen = {line.strip() for line in continuation.prompt.split("\n")}
        for line in map(str.strip, continuation.text.split("\n")):
            if re.search(r"\w", line):
                num_lines += 1
                num_repeated += line in seen
                seen.add(line)
    return num_repeated / max(num_lines, 1)
