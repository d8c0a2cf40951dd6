"""What is made of one source file: the file, its definitions as documents, and docstrings answered by what they say.

Without definitions of their own, a prompt that is one bare `def` line would be unlike anything seen, and an output
would hardly ever reach an end: a definition is short, and a document's end follows it.
"""

from __future__ import annotations

import ast
import random
import textwrap
import warnings
from collections.abc import Iterator

from .duplicates import Duplicates
from .tokenizer import render_chat, render_document

MAX_DEFINITION_CHARS = 4000
MAX_ANSWER_CHARS = 2400
MAX_QUESTION_CHARS = 400
# Few methods: whoever asks for a function wants one without `self`.
METHODS_ANSWERED = 0.3

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def parse(source: str) -> ast.Module | None:
    """The syntax tree; None where it is no Python of this interpreter's version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def documents_within(name: str, source: str, tree: ast.Module, duplicates: Duplicates) -> list[str]:
    """Rendered documents, besides the file itself; the choice among forms of questions is drawn from `name`."""
    rng = random.Random(name)
    lines = source.split("\n")
    documents: list[str] = []
    pairs: list[tuple[str, str]] = []
    for node, is_method in definitions(tree):
        text = source_of(node, lines)
        if len(text) > MAX_DEFINITION_CHARS or text.count("\n") < 2 or not duplicates.is_new_text(text):
            continue
        if not is_method:
            documents.append(render_document(text))
        if len(text) <= MAX_ANSWER_CHARS and (not is_method or rng.random() < METHODS_ANSWERED):
            question = _question(node, text, rng)
            if question:
                pairs.append((question, text.rstrip()))
    return documents + _conversations(pairs, rng)


def definitions(tree: ast.Module) -> Iterator[tuple[Definition, bool]]:
    """(definition, is it a method) for the functions and classes of the module and of its classes."""
    for node in tree.body:
        if isinstance(node, Definition):
            yield node, False
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield inner, True


def source_of(node: Definition, lines: list[str]) -> str:
    """The definition's lines with its decorators, moved to the left margin."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])) + "\n"


def _question(node: Definition, text: str, rng: random.Random) -> str | None:
    """What a person might have typed to be answered with `text`; None where that is not to be told."""
    docstring = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()[:MAX_QUESTION_CHARS]
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    if not docstring:
        return f"Write a {kind} {node.name}." if rng.random() < 0.15 else None
    signature = next((line for line in text.split("\n") if line.startswith(("def ", "class ", "async def "))), "")
    forms = [
        docstring,
        f"Write a {kind} {node.name}. {docstring}",
        f"Write a {kind} that does this: {docstring}",
        f"{signature.rstrip(':')}\n{docstring}",
        f"Write `{signature.rstrip(':')}`: {docstring}",
    ]
    return rng.choice(forms)


def _conversations(pairs: list[tuple[str, str]], rng: random.Random) -> list[str]:
    """Neighbouring pairs of one file become turns of one conversation, one to three pairs each."""
    documents, at = [], 0
    while at < len(pairs):
        turns = rng.choices((1, 2, 3), (6, 3, 1))[0]
        messages = [{"role": "system", "content": "You write Python."}] if rng.random() < 0.2 else []
        for question, answer in pairs[at : at + turns]:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        documents.append(render_chat(messages))
        at += turns
    return documents
