"""JSON Schemas for llguidance: rewritten, or refused, where it would write what does not validate.

REWRITES and REFUSALS list what version 1.9.1 does wrong. tests/frontend/test_json_schema.py fails for each that a newer
version has right: that one goes.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from photon_grpc.frontend.constraints.json_schema.bounds import exact_bounds
from photon_grpc.frontend.constraints.json_schema.nodes import children, referred, schemas_of
from photon_grpc.frontend.constraints.json_schema.numbers import MAY_BE_ROUNDED, clashing_steps, load, rounded_number
from photon_grpc.frontend.constraints.json_schema.one_of import as_any_of
from photon_grpc.frontend.constraints.json_schema.strings import exact_classes, exact_format, unwritable_characters

__all__ = ["REFUSALS", "REWRITES", "children", "exact_schema", "problem_of", "referred", "schemas_of"]


class Compensation(NamedTuple):
    """One defect of the library, and what is done about it."""

    name: str
    #: Of REWRITES: change a schema within a root, in which references are followed; return whether there was a reason.
    #: Of REFUSALS: return what is wrong with schemas, all of a root; empty where nothing is.
    apply: Any
    #: An expression that finds something in the text of every schema that it concerns.
    sign: str
    defect: str
    #: Where guidance-ai/llguidance speaks of it.
    upstream: str = "no issue found"
    #: The first version that is right.
    healed_in: str = "not yet"


REWRITES = (
    Compensation("bounds", exact_bounds, rf'"exclusiveM|{MAY_BE_ROUNDED}',
                 "takes an exclusive bound itself near another bound, 0 or 2^53; rounds bounds"),
    Compensation("oneOf", as_any_of, '"oneOf"',
                 "refuses a oneOf of $refs: it compares schemas without following them",
                 "pull request 71 (a oneOf is no longer taken for anyOf)"),
    Compensation("classes", exact_classes, r"\[\^",
                 r'takes `"`, `\` and control characters where a class of a pattern leaves them out'),
    Compensation("formats", exact_format, '"format"',
                 "takes a 29th of February in any year, the year 0000, a second 60 at any minute, a lower-case t and z",
                 "pull request 96 (days of months, without leap years)"),
)  # fmt: skip
REFUSALS = (
    Compensation("control characters", unwritable_characters, r"\\[avx]|\x7f",
                 "leaves those that it cannot write out of constants and patterns",
                 "issue 218 (escapes in constants), pull request 287 (json_allowed_escapes)"),
    Compensation("constants", rounded_number, MAY_BE_ROUNDED,
                 "writes another number than a constant of more than 15 digits: serde_json without float_roundtrip"),
    Compensation("multipleOf", clashing_steps, r'"multipleOf"(?s:.*)"multipleOf"',
                 "multiplies two steps that are combined as integers of 32 bits, and loses what is above"),
)  # fmt: skip
#: Anything may be spelled with \u.
_MAY_CHANGE, _MAY_BE_REFUSED = (
    re.compile("|".join([r"\\[uU]", *[each.sign for each in table]])) for table in (REWRITES, REFUSALS)
)
_MAY_BE_ROUNDED = re.compile(MAY_BE_ROUNDED)


def exact_schema(schema: str) -> str:
    """Return the schema, a JSON text, written so that the library does what it says. As it is where there is nothing to
    change, or no JSON."""
    if not _MAY_CHANGE.search(schema):
        return schema
    root = load(schema)
    nodes = list(schemas_of(root))
    # A schema with an $id within is where references begin: none is followed then.
    base = None if any("$id" in node and node is not root for node in nodes) else root
    num_changed = sum([each.apply(node, base) for node in nodes for each in REWRITES])
    # Of a float with many digits the library reads those that Python writes.
    return json.dumps(root) if num_changed or (nodes and _MAY_BE_ROUNDED.search(schema)) else schema


def problem_of(schema: str) -> str:
    """Return why the library would write something else than this schema, a JSON text, says; empty where it would not,
    and for what is no JSON."""
    nodes = list(schemas_of(load(schema))) if _MAY_BE_REFUSED.search(schema) else []
    return next(filter(None, (each.apply(nodes) for each in REFUSALS)), "")
