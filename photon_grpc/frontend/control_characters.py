r"""Control characters in schemas. Outputs have \b \f \n \r \t of them. JSON spells the others by their number alone:
where one character may be spelled so, any may be. The library leaves out what it cannot write: "a\u0001" becomes "a".
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from photon_grpc.frontend.schema_nodes import schemas_of

#: Code points in hexadecimal; DEL is among them, since the library has it so.
_CODE = "(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
_CHARACTER = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
#: One in an expression: itself or spelled.
_SPELLED = rf"{_CHARACTER.pattern}|\\[av]|\\(?:x|u00|U0{{6}}){_CODE}|\\[xuU]\{{0*(?:{_CODE}|[0-7bBeEfF])\}}"
#: Classes are read as a whole: the library takes characters out of them that it cannot write.
_PATTERN = re.compile(rf"(\[(?:{_SPELLED})\]|{_SPELLED})|\\.|\[\^?\]?(?:[^\]\\]+|\\.)*\]?", re.DOTALL)
#: Without one of these a schema's text holds none.
_MAY_HOLD = re.compile(r"\\[avxuU]|\x7f")


def may_hold_unwritable(schemas: str) -> bool:
    """Return whether it is worth looking for one in a JSON text that holds schemas."""
    return _MAY_HOLD.search(schemas) is not None


def holds_unwritable(schema: str) -> bool:
    """Return whether a constant or a pattern of this schema, a JSON text, has a control character that outputs have
    not, in another place than a class."""
    if not may_hold_unwritable(schema):
        return False
    try:
        root = msgspec.json.decode(schema)
    except (msgspec.MsgspecError, RecursionError):  # the compiler says what is wrong with it
        return False
    for node in schemas_of(root):
        constants = [node[keyword] for keyword in ("const", "enum") if keyword in node]
        patterns = [node.get("pattern"), *_keys(node.get("patternProperties"))]
        if _is_in_text(constants) or any(isinstance(each, str) and _is_in_pattern(each) for each in patterns):
            return True
    return False


def _keys(node: Any) -> list[str]:
    return list(node) if isinstance(node, dict) else []


def _is_in_pattern(pattern: str) -> bool:
    return any(found[1] for found in _PATTERN.finditer(pattern))


def _is_in_text(waiting: list[Any]) -> bool:
    """Strings within these values."""
    while waiting:
        node = waiting.pop()
        if isinstance(node, str) and _CHARACTER.search(node):
            return True
        if isinstance(node, list | dict):
            waiting += node.values() if isinstance(node, dict) else node
    return False
