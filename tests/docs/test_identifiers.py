"""Identifiers in backticks, in docstrings of the package and in the pages that explain it, are names of something."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "photon_grpc"
PACKAGES = sorted(
    path for path in PACKAGE.iterdir() if path.name not in ("v1", "demo", "__pycache__") and path.suffix in ("", ".py")
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PAGES = [ROOT / "docs" / "architecture.md", ROOT / "docs" / "nouns.md"]
#: Names of Python, transformers, torch and gRPC that the docstrings explain.
FOREIGN = {*dir(builtins), *keyword.kwlist, "auto_map", "enable_gqa", "rotate_half", "v1alpha"}


@pytest.fixture(scope="module")
def known() -> set[str]:
    names = set(FOREIGN)
    for path in PACKAGE.rglob("*.py"):
        names.update(path.relative_to(ROOT).with_suffix("").parts)
        names.update(source(path).names)
    for path in (ROOT / "protos").rglob("*.proto"):
        names.update(re.findall(r"\w+", path.read_text()))
    # A kernel goes by its function's name, with or without the suffix.
    return names | {name.removesuffix("_kernel") for name in names}


class Source(NamedTuple):
    """What a source names, and its docstrings."""

    names: frozenset[str]
    docstrings: list[str]


@cache
def source(path: Path) -> Source:
    """Parse a source once for all tests."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    documented = (node for node in nodes if isinstance(node, DOCUMENTED))
    return Source(frozenset(names_in(nodes)), [ast.get_docstring(node) or "" for node in documented])


def names_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield from name.split(".")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) if len(name) < 40:
                yield name


def unknown(text: str, known: set[str]) -> list[str]:
    said = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text)
    dotted = [name for name in said if not re.search(r"\.(py|md|proto|json|jinja|toml)$", name)]
    variables = [name for name in dotted if not name.startswith("PHOTON_")]
    return [name for name in variables if not known.issuperset(name.split("."))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.stem)
def test_docstrings_name_what_exists(package: Path, known: set[str]) -> None:
    for path in [package] if package.suffix else package.rglob("*.py"):
        for text in source(path).docstrings:
            wrong = unknown(text, known)
            assert not wrong, f"{path.relative_to(ROOT)}: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_what_exists(page: Path, known: set[str]) -> None:
    assert not unknown(page.read_text(), known | {path.stem for path in ROOT.iterdir()})
