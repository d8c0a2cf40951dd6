r"""Classes in patterns of schemas that leave characters out, for a compiler that takes `[^"]` to leave out nothing.

Its expression of a string's JSON has escapes for `"`, `\` and control characters. For a class that has every control
character it takes the whole of that expression, and with it the escapes of what the class leaves out. A class without
one control character, which no output has anyway, is exact.
"""

from __future__ import annotations

import json
import re
from typing import Any

from photon_grpc.frontend.schema_nodes import schemas_of

#: What is escaped, or a class that leaves out: its beginning, a sign that means itself only there.
_CLASS = re.compile(r"\\.|(\[\^)([\]-]?)", re.DOTALL)


def exact_classes(schema: str) -> str:
    """The schema, a JSON text, with such patterns. As it is where there is none, or no JSON."""
    if "[^" not in schema:
        return schema
    try:
        root = json.loads(schema)
    except (ValueError, RecursionError):  # the compiler says what is wrong with it
        return schema
    for node in schemas_of(root):
        if isinstance(node.get("pattern"), str):
            node["pattern"] = _exact(node["pattern"])
        if isinstance(node.get("patternProperties"), dict):
            node["patternProperties"] = {_exact(key): value for key, value in node["patternProperties"].items()}
    return json.dumps(root)


def _exact(pattern: str) -> str:
    return _CLASS.sub(_with_control, pattern)


def _with_control(found: re.Match[str]) -> Any:
    return found[0] if found[1] is None else rf"[^\x01{found[2] and chr(92) + found[2]}"
