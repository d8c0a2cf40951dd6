"""`python -m benchmarks`: what can be measured, and the command for each."""

from __future__ import annotations

import importlib
import pkgutil

import benchmarks

_TOOLS = {"service", "workloads", "__main__"}


def main() -> None:
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name in _TOOLS:
            continue
        doc = importlib.import_module(f"benchmarks.{module.name}").__doc__ or ""
        print(f"python -m benchmarks.{module.name}\n    {doc.strip().splitlines()[0]}\n")


if __name__ == "__main__":
    main()
