r"""Strings of schemas, rewritten or refused for a library that misreads formats, classes and control characters.

* Its `date` accepts February 29 in every year and the year 0000, its `time` a second 60 at any minute and a lower-case
  z. Not every reader of RFC 3339 accepts these.
* Its expression of a string's JSON has escapes for `"`, `\` and control characters. For a class that has every control
  character, such as `[^"]`, it uses that whole expression, including the escapes of characters that the class excludes.
  A class that lacks one control character, which no output has anyway, is exact.
* Of the control characters, outputs have only \b \f \n \r \t. JSON spells the others by number, and if one character
  may be spelled so, any may be. The library removes what it cannot write: "a\u0001" becomes "a".
"""

from __future__ import annotations

import re
from typing import Any

from photon_grpc.frontend.constraints.json_schema.nodes import Node, constants_of

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
#: Two digits of a year that are a multiple of four.
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

#: An escape, or the beginning of a negated class with a `]` or `-`, which are literal only there.
_CLASS = re.compile(r"\\.|(\[\^)([\]-]?)", re.DOTALL)

#: Code points in hexadecimal. DEL is one of them, as in the library.
_CODE = "(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
#: A control character in a regular expression, literal or escaped.
_SPELLED = rf"{_CONTROL.pattern}|\\[av]|\\(?:x|u00|U0{{6}}){_CODE}|\\[xuU]\{{0*(?:{_CODE}|[0-7bBeEfF])\}}"
#: Classes are matched as a whole, since the library may remove characters from them.
_CONTROL_IN_PATTERN = re.compile(rf"(\[(?:{_SPELLED})\]|{_SPELLED})|\\.|\[\^?\]?(?:[^\]\\]+|\\.)*\]?", re.DOTALL)


def exact_format(node: Node, _: Any) -> bool:
    """Replace a format by a pattern; return whether it was replaced."""
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
    """Exclude one control character from negated classes of patterns; return whether there were any."""
    before = node.get("pattern"), node.get("patternProperties")
    if isinstance(node.get("pattern"), str):
        node["pattern"] = _exact(node["pattern"])
    if isinstance(node.get("patternProperties"), dict):
        node["patternProperties"] = {_exact(key): value for key, value in node["patternProperties"].items()}
    return before != (node.get("pattern"), node.get("patternProperties"))


def unwritable_characters(nodes: list[Node]) -> str:
    """Return the problem of a control character in a constant, or in a pattern outside a class; "" if there is none."""
    patterns = [pattern for node in nodes for pattern in _patterns_of(node)]
    is_held = any(isinstance(value, str) and _CONTROL.search(value) for value in constants_of(nodes))
    is_held = is_held or any(found[1] for pattern in patterns for found in _CONTROL_IN_PATTERN.finditer(pattern))
    return r"the only control characters that can be written are \b \f \n \r \t" if is_held else ""


def _exact(pattern: str) -> str:
    return _CLASS.sub(_with_control, pattern)


def _with_control(found: re.Match[str]) -> Any:
    return found[0] if found[1] is None else rf"[^\x01{found[2] and chr(92) + found[2]}"


def _patterns_of(node: Node) -> list[str]:
    named = node.get("patternProperties")
    patterns = [node.get("pattern"), *(named if isinstance(named, dict) else ())]
    return [pattern for pattern in patterns if isinstance(pattern, str)]
