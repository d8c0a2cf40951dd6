"""Digests of the meaning of constraints.

By its digest, a request that crashes engines is recognised even if its constraint has other descriptions or another
order of keys.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.frontend.constraints.json_schema import schemas_of
from photon_grpc.frontend.constraints.tools import read_tools

#: Keywords of a schema that do not affect what satisfies it.
_ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema"}
)
#: Characters of a constraint; a longer one is compared by its text, since walking it would take long.
_MAX_WALKED = 2**18
_DIGEST_BYTES = 16


def digest_of(ask: ConstraintAsk) -> bytes:
    """Return the digest of a constraint that compiles."""
    content = [ask.kind, _meaning(ask), sorted(ask.choices)]
    return hashlib.blake2b(msgspec.json.encode(content), digest_size=_DIGEST_BYTES).digest()


def _meaning(ask: ConstraintAsk) -> Any:
    if len(ask.text) > _MAX_WALKED:
        return ask.text
    if ask.kind == "json_schema":
        return _plain(msgspec.json.decode(ask.text))
    if ask.kind == "tool_calls":
        tools = read_tools(ask)
        return [(tool.name, _plain(msgspec.json.decode(msgspec.json.encode(tool.schema)))) for tool in tools]
    if ask.kind == "grammar":
        lines = [line.strip() for line in ask.text.splitlines()]
        return [line for line in lines if line and not line.startswith(("//", "#"))]
    return ask.text


def _plain(schema: Any) -> str:
    for node in schemas_of(schema):
        for keyword in _ANNOTATIONS & node.keys():
            del node[keyword]
    return msgspec.json.encode(schema, order="sorted").decode()
