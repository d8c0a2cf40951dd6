"""List what can be measured, and the command for each; `--short` runs the set that takes a CPU a few minutes.

python -m benchmarks [--short]
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
#: Without a command of their own.
_PARTS = {"engine", "known_answers", "masked_rows", "saved", "service", "shapes", "traffic", "workloads"}
_FOLDERS = ("bits", "kernels", "own_services", "quality")
SHORT = (
    ("benchmarks.overhead", "--seqs", "1", "64", "--steps", "500"),
    ("benchmarks.versus_transformers", "--model", "demo"),
    ("benchmarks.serve", "--shape", "demo", "--concurrency", "1", "4", "--clients", "1"),
)


def listing() -> list[tuple[str, str]]:
    """(module, its first line), read without importing: what a benchmark needs may not be installed."""
    files = [*(HERE / name / "__main__.py" for name in _FOLDERS), *sorted(HERE.glob("[a-z]*.py"))]
    named = [(file.parent.name if file.stem == "__main__" else file.stem, file) for file in files]
    return [
        (
            f"benchmarks.{name}",
            (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0],
        )
        for name, file in named
        if name not in _PARTS
    ]


def run_short() -> int:
    """Every one of them, also after one has failed; the exit code is 1 where one has."""
    failed = False
    for module, *flags in SHORT:
        print(f"\n# python -m {module} {' '.join(flags)}\n", flush=True)
        failed |= subprocess.run([sys.executable, "-m", module, *flags]).returncode != 0
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="run the short set")
    if parser.parse_args().short:
        return run_short()
    for module, meaning in listing():
        print(f"python -m {module}\n    {meaning}\n")
    print("--help of each says more; docs/performance.md says which question each answers.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
