"""`oneOf` of schemas that are referred to, for a compiler that looks for what tells them apart in the list alone.

Where the schemas exclude each other, `oneOf` and `anyOf` mean the same.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from photon_grpc.frontend.schema_nodes import schemas_of

#: References to references that are followed.
_MAX_REFERENCES = 16


def as_any_of(schema: str) -> str:
    """The schema, a JSON text, with `anyOf` for `oneOf` where that refers to schemas of which no value satisfies two:
    by their types, or by the value of a property that they require. As it is where there is none, or no JSON."""
    if '"oneOf"' not in schema or '"$ref"' not in schema:
        return schema
    try:
        root = json.loads(schema)
    except (ValueError, RecursionError):  # the compiler says what is wrong with it
        return schema
    if schema.count('"$id"') > (isinstance(root, dict) and "$id" in root):  # from which references within it start
        return schema
    num_changed = 0
    for node in schemas_of(root):
        if "anyOf" not in node and _is_exclusive(node.get("oneOf"), root):
            node["anyOf"] = node.pop("oneOf")
            num_changed += 1
    return json.dumps(root) if num_changed else schema


def _is_exclusive(schemas: Any, root: Any) -> bool:
    if not isinstance(schemas, list) or not any(isinstance(each, dict) and "$ref" in each for each in schemas):
        return False
    resolved = [_resolved(each, root) for each in schemas]
    return all(_exclude(one, other, root) for one, other in combinations(resolved, 2))


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema that is referred to; an empty one where that is not in `root`."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if reference is None:
            return schema
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return {}
        schema = root
        for name in reference[2:].split("/"):
            schema = schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return {}


def _exclude(one: dict[str, Any], other: dict[str, Any], root: Any) -> bool:
    """Return whether it is plain that no value satisfies both."""
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


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Types of its values; empty where that is not said."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return set()
    return {"number" if kind == "integer" else kind for kind in kinds}


def _names(schema: dict[str, Any]) -> set[str]:
    """Properties that must be there."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return set()
    return {name for name in required if isinstance(name, str)} & properties.keys()


def _values(schema: dict[str, Any]) -> list[Any]:
    """All that satisfy it; empty where they are not listed."""
    listed = schema.get("enum")
    return [schema["const"]] if "const" in schema else listed if isinstance(listed, list) else []
