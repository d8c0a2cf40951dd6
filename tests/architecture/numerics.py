"""The sources that decide the bits of a result, as digests beside the number of our numerics (docs/numerics.md).

    python -m tests.architecture.numerics               # after NUMERICS has been raised
    python -m tests.architecture.numerics --same-bits   # after a change that leaves every bit as it was

Both write numerics.toml, from the root of the repository. A digest is of what a file does: comments, docstrings and
layout do not count.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from photon_grpc.runner.numerics import NUMERICS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "photon_grpc"
TABLE = Path(__file__).with_name("numerics.toml")

#: Everything that computes, and of the runner what prepares its inputs and chooses its shapes.
SOURCES = (
    "kernels/**/*.py",
    "layers/**/*.py",
    "models/**/*.py",
    "config/rope.py",
    "runner/buckets.py",
    "runner/build.py",
    "runner/eager.py",
    "runner/graphs.py",
    "runner/intra_op_threads.py",
    "runner/library.py",
    "runner/logprob_records.py",
    "runner/sampler.py",
    "runner/slot_table.py",
    "runner/step.py",
)
_LENGTH = 16

ADVICE = """\
Sources that decide numbers have changed, and NUMERICS is still {number}:
  {files}
If the bits of any result may differ now, raise NUMERICS in photon_grpc/runner/numerics.py, say so in CHANGELOG.md, run
  python -m tests.architecture.numerics
Else show that none differs, on a GPU, with the commit before in OTHER_TREE:
  PYTHONPATH=OTHER_TREE python -P benchmarks/golden.py --out before.json
  PYTHONPATH=. python -P benchmarks/golden.py --out after.json
  python -m benchmarks.golden --compare before.json after.json
and run
  python -m tests.architecture.numerics --same-bits
"""


def recorded() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@cache
def digests(package: Path = PACKAGE) -> Mapping[str, str]:
    """Return the digest of every source by its path in the package."""
    paths = sorted({path for pattern in SOURCES for path in package.glob(pattern)})
    return {str(path.relative_to(package)): digest_of(path.read_text(encoding="utf-8")) for path in paths}


def digest_of(source: str) -> str:
    """Return the digest of what a source does, the same for every version of Python that we support."""
    text = "".join(_written(_without_docstrings(ast.parse(source))))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def changed(now: Mapping[str, str]) -> list[str]:
    """Return the sources that differ from their record: changed, new or gone."""
    before = recorded()["sources"]
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def advice(files: list[str]) -> str:
    return ADVICE.format(number=NUMERICS, files="\n  ".join(files))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_text(each)]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _written(value: Any) -> Iterator[str]:
    """Write a tree without places. ast.dump writes empty fields, which differ between versions of Python."""
    if isinstance(value, list):
        yield "["
        for each in value:
            yield from _written(each)
        yield "]"
    elif isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, part in ast.iter_fields(value):
            if part is not None and part != []:
                yield f" {name}="
                yield from _written(part)
        yield ")"
    else:
        yield repr(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--same-bits", action="store_true", help="the change leaves every bit as it was")
    is_same = parser.parse_args().same_bits
    now = digests()
    if TABLE.exists() and (files := changed(now)) and recorded()["number"] == NUMERICS and not is_same:
        print(advice(files), file=sys.stderr)
        return 1
    head = f"# Written by `python -m tests.architecture.numerics`, which says when.\nnumber = {NUMERICS}\n\n[sources]\n"
    TABLE.write_text(head + "".join(f'"{name}" = "{digest}"\n' for name, digest in now.items()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
