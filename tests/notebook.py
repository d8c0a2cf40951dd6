"""Cells of a notebook, run as IPython runs them: in the thread of an event loop that runs already."""

from __future__ import annotations

import ast
import inspect
from typing import Any


async def run_cells(*cells: str, **names: Any) -> dict[str, Any]:
    """One after another, `await` at their top level included; the names that they leave."""
    for cell in cells:
        result = eval(compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(result):
            await result
    return names
