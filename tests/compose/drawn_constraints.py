"""Random schemas, regular expressions, choices and grammars, each with a check independent of the compiler."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

from photon_grpc.core.ask import ConstraintAsk

Check = Callable[[str], bool]

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_PATTERNS = ("^[a-c]{1,4}$", "^x-[0-9]{2}$", "^(foo|bar)+$")
_REGEXES = (
    r"[a-z]{2,5}-[0-9]{1,3}",
    r"(red|green|blue)( (red|green|blue)){0,2}",
    r"\d{4}-(0[1-9]|1[0-2])-([0-2]\d|3[01])",
    r"[^\W\d_]{3,8}\.",
    r"(é|ü|日本){1,4}",
    r"[🙂-🙅]{1,3}!?",
    r"(a|b)*c",
    r"(?i)yes|no",
    r"\{[0-9a-f]{2}(,[0-9a-f]{2}){0,3}\}",
)


def draw(random: Random) -> tuple[ConstraintAsk, Check]:
    kind = random.choice(("schema",) * 5 + ("regex", "choices", "grammar"))
    if kind == "schema":
        schema = draw_schema(random)
        return ConstraintAsk(
            "json_schema", json.dumps(schema)
        ), lambda text: is_compact(text) and is_valid(json.loads(text), schema)
    if kind == "regex":
        regex = random.choice(_REGEXES)
        return ConstraintAsk("regex", regex), lambda text: re.fullmatch(regex, text) is not None
    if kind == "choices":
        choices = tuple(random.sample(["yes", "no", "a.b", "(c|d)", "naïve", "yes and no", 'q"\\', "🙂", "\n"], 4))
        return ConstraintAsk("choices", choices=choices), choices.__contains__
    return ConstraintAsk("grammar", 'start: "(" start ")" | "[" start "]" | /[a-z]{1,3}/'), _is_nested


def draw_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "date", "either"]
    kind = random.choice(kinds + (["object", "object", "object", "array", "array"] if depth else []))
    low = random.randrange(-50, 50)
    match kind:
        case "string":
            return {"type": "string", "minLength": random.randrange(3), "maxLength": 3 + random.randrange(8)}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + random.randrange(200)}
        case "number":
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + 1 + random.randrange(9)}
        case "enum":
            return {"enum": random.sample(["a", "é\n", 1, 2.5, True, None, ["x"], {"k": []}], 3)}
        case "const":
            return {"const": random.choice(["only", 17, {"a": [1, None]}])}
        case "pattern":
            return {"type": "string", "pattern": random.choice(_PATTERNS)}
        case "date":
            return {"type": "string", "format": "date"}
        case "either":
            return {"anyOf": [draw_schema(random, 0), {"type": "null"}]}
        case "array":
            return {"type": "array", "items": draw_schema(random, depth - 1), "minItems": 1, "maxItems": 3}
        case "object":
            names = random.sample(["id", "name", "größe", "a b", "tags", "x/y"], random.randrange(1, 4))
            properties = {name: draw_schema(random, depth - 1) for name in names}
            required = [name for name in names if random.random() < 0.7]
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
                "title": "an annotation",
            }
        case _:
            return {"type": kind}


def is_compact(text: str) -> bool:
    """No white space outside strings."""
    return not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text))


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """As JSON Schema says, for the keywords that are drawn here."""
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    checks = {
        "enum": lambda wanted: any(_same(value, each) for each in wanted),
        "const": lambda wanted: _same(value, wanted),
        "minLength": lambda number: len(value) >= number,
        "maxLength": lambda number: len(value) <= number,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "format": lambda name: name == "date" and re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None,
        "minimum": lambda number: value >= number,
        "maximum": lambda number: value <= number,
        "exclusiveMinimum": lambda number: value > number,
        "minItems": lambda number: len(value) >= number,
        "maxItems": lambda number: len(value) <= number,
        "items": lambda items: all(is_valid(each, items) for each in value),
        "anyOf": lambda schemas: any(is_valid(value, each) for each in schemas),
        "required": lambda names: set(names) <= set(value),
        "properties": lambda known: all(is_valid(value[name], known[name]) for name in value if name in known),
        "additionalProperties": lambda allowed: allowed or set(value) <= set(schema["properties"]),
        "type": lambda kind: True,
        "title": lambda title: True,
    }
    return all(checks[keyword](argument) for keyword, argument in schema.items())


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _is_nested(text: str) -> bool:
    while len(text) > 1 and text[0] + text[-1] in ("()", "[]"):
        text = text[1:-1]
    return re.fullmatch("[a-z]{1,3}", text) is not None
