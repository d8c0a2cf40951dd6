"""`oneOf` of `$ref`s, rewritten for a library that compares the schemas in the list without following references.

If the schemas exclude each other, `oneOf` and `anyOf` mean the same.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from photon_grpc.frontend.constraints.json_schema.nodes import Node, referred

#: The longest chain of references that is followed.
_MAX_REFERENCES = 16


def as_any_of(node: Node, root: Any) -> bool:
    """Replace `oneOf` by `anyOf` if no value satisfies two of its schemas; return whether it was replaced.

    Schemas exclude each other by their types, or by the value of a property that they require.
    """
    if "anyOf" in node or not _is_exclusive(node.get("oneOf"), root):
        return False
    node["anyOf"] = node.pop("oneOf")
    return True


def _is_exclusive(schemas: Any, root: Any) -> bool:
    if not isinstance(schemas, list) or not any(isinstance(each, dict) and "$ref" in each for each in schemas):
        return False
    resolved = [_resolved(each, root) for each in schemas]
    return all(_exclude(one, other, root) for one, other in combinations(resolved, 2))


def _resolved(schema: Any, root: Any) -> Node:
    """Return the schema at the end of the references, an empty one if that is not in `root`."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        if "$ref" not in schema:
            return schema
        schema = referred(root, schema["$ref"])
    return {}


def _exclude(one: Node, other: Node, root: Any) -> bool:
    """Return whether certainly no value satisfies both."""
    kinds = [_kinds(each) for each in (one, other)]
    if all(kinds) and kinds[0].isdisjoint(kinds[1]):
        return True
    if kinds != [{"object"}, {"object"}]:
        return False
    for name in _names(one) & _names(other):
        values = [_values(_resolved(each["properties"].get(name), root)) for each in (one, other)]
        if all(values) and not any(mine == theirs for mine in values[0] for theirs in values[1]):
            return True
    return False


def _kinds(schema: Node) -> set[str]:
    """Return the types of a schema's values, an empty set if it does not name them."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return set()
    return {"number" if kind == "integer" else kind for kind in kinds}


def _names(schema: Node) -> set[str]:
    """Return the required properties of a schema."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return set()
    return {name for name in required if isinstance(name, str)} & properties.keys()


def _values(schema: Node) -> list[Any]:
    """Return all values that satisfy a schema, an empty list if it does not list them."""
    listed = schema.get("enum")
    return [schema["const"]] if "const" in schema else listed if isinstance(listed, list) else []
