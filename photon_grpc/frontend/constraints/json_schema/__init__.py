"""JSON Schemas for llguidance, rewritten or refused if it would write output that does not validate.

REWRITES and REFUSALS list the defects of version 1.9.1. tests/frontend/test_json_schema.py fails for each that a newer
version has fixed, which can then be removed.
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


class Workaround(NamedTuple):
    """One defect of the library, and what is done about it."""

    name: str
    #: In REWRITES: change a schema within a root, in which references are followed; return whether it was changed.
    #: In REFUSALS: return what is wrong with all schemas of a root, "" if nothing is.
    apply: Any
    #: A regular expression that matches in the text of every affected schema.
    sign: str
    defect: str
    #: The thread of guidance-ai/llguidance about it.
    upstream: str = "no issue found"
    #: The first version without it.
    fixed_in: str = "not yet"


REWRITES = (
    Workaround("bounds", exact_bounds, rf'"exclusiveM|{MAY_BE_ROUNDED}',
                 "accepts an exclusive bound itself near another bound, 0 or 2^53; rounds bounds"),
    Workaround("oneOf", as_any_of, '"oneOf"',
                 "refuses a oneOf of $refs: it compares schemas without following them",
                 "pull request 71 (a oneOf is no longer read as anyOf)"),
    Workaround("classes", exact_classes, r"\[\^",
                 r'accepts `"`, `\` and control characters where a class of a pattern excludes them'),
    Workaround("formats", exact_format, '"format"',
                 "accepts February 29 in any year, the year 0000, a second 60 at any minute, a lower-case t and z",
                 "pull request 96 (days of months, without leap years)"),
)  # fmt: skip
REFUSALS = (
    Workaround("control characters", unwritable_characters, r"\\[avx]|\x7f",
                 "removes those that it cannot write from constants and patterns",
                 "issue 218 (escapes in constants), pull request 287 (json_allowed_escapes)"),
    Workaround("constants", rounded_number, MAY_BE_ROUNDED,
                 "changes constants of more than 15 digits: serde_json without float_roundtrip"),
    Workaround("multipleOf", clashing_steps, r'"multipleOf"(?s:.*)"multipleOf"',
                 "multiplies combined steps as integers of 32 bits, which overflow"),
)  # fmt: skip
#: Any character may be spelled with \u.
_MAY_CHANGE, _MAY_BE_REFUSED = (
    re.compile("|".join([r"\\[uU]", *[each.sign for each in table]])) for table in (REWRITES, REFUSALS)
)
_MAY_BE_ROUNDED = re.compile(MAY_BE_ROUNDED)


def exact_schema(schema: str) -> str:
    """Return a schema, as JSON text, rewritten so that the library obeys it.

    A schema that needs no change, or is no JSON, is returned as it is.
    """
    if not _MAY_CHANGE.search(schema):
        return schema
    root = load(schema)
    nodes = list(schemas_of(root))
    # References begin at a schema with an $id. If one stands within the root, none is followed.
    base = None if any("$id" in node and node is not root for node in nodes) else root
    num_changed = sum([each.apply(node, base) for node in nodes for each in REWRITES])
    # The library reads a float with many digits correctly as Python writes it.
    return json.dumps(root) if num_changed or (nodes and _MAY_BE_ROUNDED.search(schema)) else schema


def problem_of(schema: str) -> str:
    """Return why the library would violate a schema, given as JSON text; "" if it would not, or if it is no JSON."""
    nodes = list(schemas_of(load(schema))) if _MAY_BE_REFUSED.search(schema) else []
    return next(filter(None, (each.apply(nodes) for each in REFUSALS)), "")
