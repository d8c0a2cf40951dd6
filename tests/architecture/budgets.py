"""The measures that budgets.toml limits: findings of ruff by rule, and lines by package.

`python -m tests.architecture.budgets > tests/architecture/budgets.toml` records today's numbers, from the root of the
repository. A higher number of lines needs a decision record (docs/decisions); findings of ruff may only become fewer.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "photon_grpc"
GENERATED = (PACKAGE / "v1", PACKAGE / "admin")
TABLE = Path(__file__).with_name("budgets.toml")

RULES = ("D205", "D400", "D401", "PLR0913")
_RUFF = ("check", "--no-cache", "--exit-zero", "--output-format", "concise", "--config", "lint.pylint.max-args=6")


@cache
def recorded() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@cache
def findings() -> dict[str, int]:
    """Findings by rule, from one run of ruff."""
    command = [sys.executable, "-m", "ruff", *_RUFF, "--select", ",".join(RULES), str(PACKAGE)]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    counts = Counter(line.split()[1] for line in lines if line.count(":") >= 3)
    return {rule: counts[rule] for rule in RULES}


def sources() -> list[Path]:
    """Every file of the package that is written by hand."""
    return sorted(path for path in PACKAGE.rglob("*.py") if not any(map(path.is_relative_to, GENERATED)))


def lines_of(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def lines_by_package() -> dict[str, int]:
    """Lines by first folder; files beside the folders count as the package `photon_grpc`."""
    counts: Counter[str] = Counter()
    for path in sources():
        counts[path.relative_to(ROOT).parts[-2 if path.parent == PACKAGE else 1]] += lines_of(path)
    return dict(sorted(counts.items()))


def main() -> None:
    print("# Written by `python -m tests.architecture.budgets > tests/architecture/budgets.toml`.")
    print("\n# Findings of ruff in photon_grpc. They may only become fewer.\n[findings]")
    print(*(f"{rule} = {count}" for rule, count in findings().items()), sep="\n")
    print("\n# Lines of .py files that are not generated. A higher number needs a decision record.\n[lines]")
    print(*(f"{package} = {count}" for package, count in lines_by_package().items()), sep="\n")


if __name__ == "__main__":
    main()
