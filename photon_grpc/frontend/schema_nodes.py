"""The schemas within a JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Hold schemas by name, and are no schema.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: Hold no schema.
_VALUES = ("const", "enum", "default", "examples")


def schemas_of(root: Any) -> Iterator[dict[str, Any]]:
    """Every schema that is an object, `root` too. Whoever gets one may change it."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            yield node
            for keyword, value in node.items():
                if keyword in _MAPS and isinstance(value, dict):
                    waiting += value.values()
                elif keyword not in _VALUES:
                    waiting.append(value)
