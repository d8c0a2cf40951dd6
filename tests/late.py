"""Modules that take a second to import, for tests whose files every worker of pytest-xdist collects."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """Stands for a module, which is imported when a test first uses a name of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        # pytest asks every global of a file for `_mock_name` and `__wrapped__` when it collects.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
