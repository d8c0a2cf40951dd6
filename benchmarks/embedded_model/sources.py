"""Which files of a package are worth learning, and what of them: code that people wrote and read.

Knows paths and text; knows no syntax trees and no token ids.
"""

from __future__ import annotations

import random
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

MAX_CHARS = 150_000
# Tests repeat themselves; vendored files are other packages'; the rest are tables, or written by programs.
SKIPPED_DIRECTORY = re.compile(
    r"tests?|.*_tests?|testing|testdata|idle_test|_?vendor(ed)?|_?vendor_.*|extern|externals?|third_?party|bundled"
    r"|_?generated|gen|proto|protos|migrations|locale|locales|data|datasets_data|fixtures"
    r"|site-packages|dist-packages|encodings|pydoc_data|__pycache__|cjkencodings|.*\.dist-info|.*\.data"
)
SKIPPED_FILE = re.compile(
    r"test_.*|.*_tests?|conftest|.*_pb2.*|_?version|versioneer|_sysconfigdata.*|bad_.*|.*unicode.*table.*|.*_tables?"
)
WRITTEN_BY_PROGRAM = re.compile(
    r"generated (by|from|with|using)|auto-?\s?generated|do not (edit|modify)", re.IGNORECASE
)
OTHER_LICENCES = ("General Public Lic", "GPL", "Mozilla Public", "Creative Commons", "CC-BY", "CC BY")
LEADING_COMMENTS = re.compile(r"\A(?:[ \t]*(?:#[^\n]*)?\n)+")


def wheel_sources(wheel: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """(path, text) of each Python file worth learning, in an order that is the same each time."""
    for name in shuffled(wheel.namelist()):
        if is_wanted(PurePosixPath(name)):
            source = clean(wheel.read(name))
            if source is not None:
                yield name, source


def library_sources(root: Path, is_asked: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, str]]:
    """The same of a standard library's directory, of the paths that are asked for."""
    for name in shuffled([path.relative_to(root).as_posix() for path in root.rglob("*.py")]):
        if is_asked(name) and is_wanted(PurePosixPath(name)):
            source = clean((root / name).read_bytes())
            if source is not None:
                yield name, source


def shuffled(names: list[str]) -> list[str]:
    """So that a share of a package has files of all its parts."""
    names = sorted(names)
    random.Random(0).shuffle(names)
    return names


def is_wanted(path: PurePosixPath) -> bool:
    """By its name alone."""
    named_well = not any(map(SKIPPED_DIRECTORY.fullmatch, path.parts[:-1])) and not SKIPPED_FILE.fullmatch(path.stem)
    return path.suffix == ".py" and named_well


def clean(data: bytes) -> str | None:
    """The text without the comments above its first statement; None where it is not UTF-8 or not worth learning."""
    try:
        source = data.decode("utf-8").replace("\r\n", "\n").expandtabs(4).rstrip() + "\n"
    except UnicodeDecodeError:
        return None
    if WRITTEN_BY_PROGRAM.search(source[:3000]) or any(name in source for name in OTHER_LICENCES):
        return None
    source = LEADING_COMMENTS.sub("", source)
    return source if reads_like_code(source) and not repeats_itself(source) else None


def reads_like_code(source: str) -> bool:
    """False for tables and for lines that were not written by hand: mostly digits and punctuation, or very long."""
    if not 200 <= len(source) <= MAX_CHARS or max(map(len, source.split("\n"))) > 400:
        return False
    sample = source[::5]
    letters = sum(map(str.isalpha, sample)) / len(sample)
    digits = sum(map(str.isdigit, sample)) / len(sample)
    return (letters > 0.35 and digits < 0.15 and source.isascii()) or (letters > 0.5 and digits < 0.1)


def repeats_itself(source: str) -> bool:
    """Fewer than half of the lines that say something are distinct."""
    lines = [line.strip() for line in source.split("\n") if len(line.strip()) > 5]
    return len(set(lines)) < 0.5 * len(lines)
