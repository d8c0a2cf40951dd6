r"""Strings of schemas, for a library that takes formats, classes and control characters otherwise than they are meant.

* Its `date` has a 29th of February in every year and the year 0000, its `time` a second 60 at any minute and a
  lower-case z: none of them is taken by every reader of RFC 3339.
* Its expression of a string's JSON has escapes for `"`, `\` and control characters. For a class that has every control
  character, as `[^"]` has, it takes the whole of that expression, and with it the escapes of what the class leaves out.
  A class without one control character, which no output has anyway, is exact.
* Outputs have \b \f \n \r \t of control characters. JSON spells the others by their number alone: where one character
  may be spelled so, any may be. The library leaves out what it cannot write: "a\u0001" becomes "a".
"""

from __future__ import annotations

import re
from typing import Any

from photon_grpc.frontend.constraints.json_schema.nodes import Node, constants_of

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
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

#: What is escaped, or a class that leaves out: its beginning, a sign that means itself only there.
_CLASS = re.compile(r"\\.|(\[\^)([\]-]?)", re.DOTALL)

#: Code points in hexadecimal; DEL is among them, since the library has it so.
_CODE = "(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
#: One in an expression: itself or spelled.
_SPELLED = rf"{_CONTROL.pattern}|\\[av]|\\(?:x|u00|U0{{6}}){_CODE}|\\[xuU]\{{0*(?:{_CODE}|[0-7bBeEfF])\}}"
#: Classes are read as a whole: the library takes characters out of them that it cannot write.
_CONTROL_IN_PATTERN = re.compile(rf"(\[(?:{_SPELLED})\]|{_SPELLED})|\\.|\[\^?\]?(?:[^\]\\]+|\\.)*\]?", re.DOTALL)


def exact_format(node: Node, _: Any) -> bool:
    """Put a pattern in the place of a format."""
    name = node.get("format")
    pattern = _FORMATS.get(name) if isinstance(name, str) else None
    if pattern is None or not isinstance(node.get("allOf", []), list):
        return False
    del node["format"]
    if "pattern" in node:
        node["allOf"] = [*node.get("allOf", ()), {"pattern": pattern}]
    else:
        node["pattern"] = pattern
    return True


def exact_classes(node: Node, _: Any) -> bool:
    """Write the classes of patterns without a control character."""
    before = node.get("pattern"), node.get("patternProperties")
    if isinstance(node.get("pattern"), str):
        node["pattern"] = _exact(node["pattern"])
    if isinstance(node.get("patternProperties"), dict):
        node["patternProperties"] = {_exact(key): value for key, value in node["patternProperties"].items()}
    return before != (node.get("pattern"), node.get("patternProperties"))


def unwritable_characters(nodes: list[Node]) -> str:
    """Say that a constant or a pattern has a control character that outputs have not, in another place than a class."""
    patterns = [pattern for node in nodes for pattern in _patterns_of(node)]
    is_held = any(isinstance(value, str) and _CONTROL.search(value) for value in constants_of(nodes))
    is_held = is_held or any(found[1] for pattern in patterns for found in _CONTROL_IN_PATTERN.finditer(pattern))
    return r"of control characters only \b \f \n \r \t can be written" if is_held else ""


def _exact(pattern: str) -> str:
    return _CLASS.sub(_with_control, pattern)


def _with_control(found: re.Match[str]) -> Any:
    return found[0] if found[1] is None else rf"[^\x01{found[2] and chr(92) + found[2]}"


def _patterns_of(node: Node) -> list[str]:
    named = node.get("patternProperties")
    patterns = [node.get("pattern"), *(named if isinstance(named, dict) else ())]
    return [pattern for pattern in patterns if isinstance(pattern, str)]
