"""Formats of times as patterns, for a compiler whose own take the 29th of February in every year, the year 0000, a
second 60 at any minute and a lower-case z, none of which every reader of RFC 3339 takes."""

from __future__ import annotations

import json
from typing import Any

from photon_grpc.frontend.schema_nodes import schemas_of

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
#: Of two digits of a year: a multiple of four.
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def exact_formats(schema: str) -> str:
    """The schema, a JSON text, with such patterns. As it is where there is none, or no JSON."""
    if '"format"' not in schema:
        return schema
    try:
        root = json.loads(schema)
    except (ValueError, RecursionError):  # the compiler says what is wrong with it
        return schema
    return json.dumps(root) if sum([_replaced(node) for node in schemas_of(root)]) else schema


def _replaced(node: dict[str, Any]) -> bool:
    name = node.get("format")
    pattern = _PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None or not isinstance(node.get("allOf", []), list):
        return False
    del node["format"]
    if "pattern" in node:
        node["allOf"] = [*node.get("allOf", ()), {"pattern": pattern}]
    else:
        node["pattern"] = pattern
    return True
