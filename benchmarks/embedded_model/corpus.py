"""`python -m benchmarks.embedded_model.corpus --wheels DIRECTORY --out FILE.jsonl.xz`: builds what the models learn.

Downloads the listed packages, checks their licences, keeps the files worth learning, drops near-duplicates, and splits
by package: a held-out package is wholly unseen. A few files of the standard library are held out besides. The result is
one compressed file of JSON lines; training needs nothing else.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import lzma
import platform
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .documents import documents_within, parse
from .duplicates import Duplicates
from .packages import LIST, Package, download, open_wheel, read_packages
from .sources import library_sources, wheel_sources
from .tokenizer import SPECIAL_TOKENS, render_document

# A light preset over a long window: what a package repeats of itself and of its like is within it.
COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 4, "dict_size": 1 << 26}]
STDLIB = "standard library"
PACKAGES = "other people's packages"
MAX_PACKAGE_CHARS = 750_000
MAX_HELD_OUT_CHARS = {PACKAGES: 45_000, STDLIB: 150_000}
STDLIB_HELD_OUT_PER_MILLE = 30

Sources = Iterable[tuple[str, str]]


@dataclass
class Corpus:
    """Files to learn, each with the documents made of its parts, and whole held-out files by where they are from."""

    python: str
    num_packages: int = 0
    num_held_out_packages: int = 0
    learnt: list[tuple[str, list[str]]] = field(default_factory=list)
    held_out: dict[str, list[str]] = field(default_factory=lambda: {PACKAGES: [], STDLIB: []})

    @property
    def files(self) -> list[str]:
        return [source for source, _ in self.learnt]

    @property
    def documents(self) -> list[str]:
        """As the models see them: each file, then what was made of it."""
        return [text for source, within in self.learnt for text in (render_document(source), *within)]

    def learn(self, name: str, sources: Sources, duplicates: Duplicates) -> None:
        """Adds each new file, until the package has had its share."""
        num_chars = 0
        for path, source in sources:
            tree = parse(source) if duplicates.is_new_file(source) and not has_special_tokens(source) else None
            if tree is not None:
                num_chars += len(source)
                self.learnt.append((source, documents_within(f"{name}/{path}", source, tree, duplicates)))
            if num_chars > MAX_PACKAGE_CHARS:
                return

    def hold_out(self, origin: str, sources: Sources, duplicates: Duplicates) -> None:
        """Keeps a sample of the files for evaluation; what is like any of them is not learnt."""
        num_chars = 0
        for _, source in sources:
            fits = num_chars + len(source) <= MAX_HELD_OUT_CHARS[origin] and not has_special_tokens(source)
            if duplicates.is_new_file(source) and fits and parse(source) is not None:
                num_chars += len(source)
                self.held_out[origin].append(source)


def build(wheels: Path, stdlib: Path, packages: Path = LIST) -> Corpus:
    """Reads every listed wheel in `wheels` and this interpreter's library in `stdlib`; held-out files first."""
    corpus, duplicates, listed = Corpus(platform.python_version()), Duplicates(), read_packages(packages)
    hold_out(corpus, wheels, stdlib, [package for package in listed if package.is_held_out], duplicates)
    for package in [package for package in listed if not package.is_held_out]:
        with open_wheel(wheels, package) as wheel:
            corpus.num_packages += 1
            corpus.learn(package.name, wheel_sources(wheel), duplicates)
    corpus.learn(STDLIB, library_sources(stdlib, lambda path: not is_held_out_library(path)), duplicates)
    return corpus


def hold_out(corpus: Corpus, wheels: Path, stdlib: Path, packages: Iterable[Package], duplicates: Duplicates) -> None:
    """Keep what the models do not learn: of the library, and of these packages."""
    corpus.hold_out(STDLIB, library_sources(stdlib, is_held_out_library), duplicates)
    for package in packages:
        with open_wheel(wheels, package) as wheel:
            corpus.num_held_out_packages += 1
            corpus.hold_out(PACKAGES, wheel_sources(wheel), duplicates)


def has_special_tokens(source: str) -> bool:
    """Written in a text they would be read as turns and ends."""
    return any(token in source for token in SPECIAL_TOKENS)


def is_held_out_library(path: str) -> bool:
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < STDLIB_HELD_OUT_PER_MILLE


def write(corpus: Corpus, path: Path) -> None:
    """JSON lines: where from, each held-out file, each learnt file beside its documents (so that they compress)."""
    with lzma.open(path, "wt", filters=COMPRESSION, encoding="utf-8") as out:
        for line in (
            [corpus.python, corpus.num_packages, corpus.num_held_out_packages],
            *([origin, source] for origin, sources in corpus.held_out.items() for source in sources),
            *corpus.learnt,
        ):
            out.write(json.dumps(line) + "\n")


def read(path: Path) -> Corpus:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        corpus = Corpus(*json.loads(next(lines)))
        for first, second in map(json.loads, lines):
            if isinstance(second, str):
                corpus.held_out[first].append(second)
            else:
                corpus.learnt.append((first, second))
    return corpus


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedded_model.corpus", description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True, help="where wheels are, and where they are downloaded to")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", type=Path, default=LIST, help="another list")
    arguments = parser.parse_args()
    started = time.monotonic()
    gc.disable()  # Syntax trees hold no cycles, and there are many nodes to look through in vain.
    download(read_packages(arguments.packages), arguments.wheels)
    corpus = build(arguments.wheels, Path(sysconfig.get_path("stdlib")), arguments.packages)
    num_megabytes = sum(map(len, corpus.files)) / 1e6
    print(f"{len(corpus.files):,} files, {num_megabytes:.1f} MB, {len(corpus.documents):,} documents", flush=True)
    write(corpus, arguments.out)
    megabytes = arguments.out.stat().st_size / 1e6
    print(f"{megabytes:.1f} MB in {arguments.out}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
