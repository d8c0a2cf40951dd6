"""The schemas within a JSON Schema, and the values within its constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: A schema that is an object.
Node = dict[str, Any]

#: Keywords that hold schemas by name.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: Keywords that hold no schema.
_VALUES = ("const", "enum", "default", "examples")


def children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything within a schema that may be one, with the end of its JSON pointer."""
    for keyword, value in node.items() if isinstance(node, dict) else ():
        if keyword in _MAPS and isinstance(value, dict):
            for name, child in value.items():
                yield f"/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", child
        elif isinstance(value, list) and keyword not in _VALUES:
            for number, child in enumerate(value):
                yield f"/{keyword}/{number}", child
        elif keyword not in _VALUES:
            yield f"/{keyword}", value


def schemas_of(root: Any) -> Iterator[Node]:
    """Yield every schema that is an object, including `root`. The receiver may change it."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += [child for _, child in children(node)]


def referred(root: Any, reference: Any) -> Any:
    """Return the schema that a `$ref` points to, None if that is not within `root`."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for name in reference[2:].split("/"):
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def constants_of(nodes: list[Node]) -> Iterator[Any]:
    """Yield the strings, numbers, booleans and nulls within the constants of schemas."""
    waiting = [node[keyword] for node in nodes for keyword in ("const", "enum") if keyword in node]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | dict):
            waiting += value.values() if isinstance(value, dict) else value
        else:
            yield value
