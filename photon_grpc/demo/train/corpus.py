"""Which text the models learn: the source of the Python standard library, as files, definitions and conversations.

Knows files and syntax trees; does not know token ids.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .tokenizer import render_chat, render_document

# Tables and prose that teach no Python: character maps, keyword documentation, build variables, broken sources.
SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__", "cjkencodings"}
SKIPPED_PREFIXES = ("_sysconfigdata", "bad_", "bad", "test_unicode_identifiers")
TEST_DIRECTORIES = {"test", "tests", "idle_test"}
HELD_OUT_PER_MILLE = 30
MAX_DEFINITION_CHARS = 4000
MAX_ANSWER_CHARS = 2400

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Corpus:
    """Rendered documents to learn, and whole held-out files, library and tests apart."""

    documents: list[str] = field(default_factory=list)
    held_out_library: list[str] = field(default_factory=list)
    held_out_tests: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def build_corpus(stdlib: Path | None = None, max_files: int | None = None) -> Corpus:
    """Reads `stdlib` (default: the running interpreter's) and splits it by a hash of each file's path."""
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    corpus = Corpus()
    for relative, source, tree in list(_python_files(root))[:max_files]:
        in_tests = bool(TEST_DIRECTORIES.intersection(relative.parts))
        if _is_held_out(relative):
            (corpus.held_out_tests if in_tests else corpus.held_out_library).append(source)
            continue
        corpus.files.append(source)
        corpus.documents.append(render_document(source))
        corpus.documents.extend(_definition_documents(relative, source, tree, in_tests))
    return corpus


def _python_files(root: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """Every distinct file worth learning, in path order shuffled by a fixed seed, with its syntax tree."""
    seen: set[str] = set()
    paths = [path for path in sorted(root.rglob("*.py")) if _is_wanted(path.relative_to(root))]
    random.Random(0).shuffle(paths)
    for path in paths:
        try:
            source = path.read_text(encoding="utf-8").replace("\r\n", "\n")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if source not in seen and _reads_like_code(source):
            seen.add(source)
            yield path.relative_to(root), source, tree


def _is_wanted(relative: Path) -> bool:
    directories = set(relative.parts[:-1])
    return not directories & SKIPPED_DIRECTORIES and not relative.name.startswith(SKIPPED_PREFIXES)


def _reads_like_code(source: str) -> bool:
    """False for generated tables: mostly digits and punctuation, or lines nobody wrote by hand."""
    if len(source) < 100 or max(map(len, source.split("\n"))) > 2000:
        return False
    letters = sum(map(str.isalpha, source)) / len(source)
    digits = sum(map(str.isdigit, source)) / len(source)
    return (letters > 0.35 and digits < 0.15 and source.isascii()) or (letters > 0.5 and digits < 0.1)


def _is_held_out(relative: Path) -> bool:
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def _definition_documents(relative: Path, source: str, tree: ast.Module, in_tests: bool) -> list[str]:
    """Functions and classes as documents of their own, and as answers to what their docstring asks for.

    Without them a prompt that is one bare `def` line would be unlike anything seen, and an output would hardly ever
    reach an end: a definition is short, and a document's end follows it.
    """
    rng = random.Random(relative.as_posix())
    lines = source.split("\n")
    documents: list[str] = []
    pairs: list[tuple[str, str]] = []
    for node, is_method in _definitions(tree):
        text = _source_of(node, lines)
        if len(text) > MAX_DEFINITION_CHARS or text.count("\n") < 2 or node.name.startswith("test"):
            continue
        if not is_method and not node.name.endswith(("Test", "Tests", "TestCase")):
            documents.append(render_document(text))
        question = _question(node, text, rng)
        if question and not in_tests and len(text) <= MAX_ANSWER_CHARS:
            pairs.append((question, text.rstrip()))
    return documents + _conversations(pairs, rng)


def _definitions(tree: ast.Module) -> Iterator[tuple[Definition, bool]]:
    """(definition, is it a method) for every function and class, nested ones too."""
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Definition):
                is_method = isinstance(parent, ast.ClassDef) and not isinstance(node, ast.ClassDef)
                yield node, is_method


def _source_of(node: Definition, lines: list[str]) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])) + "\n"


def _question(node: Definition, text: str, rng: random.Random) -> str | None:
    """What a person might have typed to be answered with `text`; None where nobody could."""
    docstring = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    if not docstring:
        return f"Write a {kind} {node.name}." if rng.random() < 0.3 else None
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
