"""Reading of a JSON body within limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect

from photon_grpc.core.json_fault import json_fault
from photon_grpc.errors import Cancelled, InvalidRequest, MalformedMessage
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.errors import HttpError

#: Values of a body, such as the ids of its prompts. Parsing makes an object of each and blocks the event loop.
MAX_VALUES = 1 << 20
#: Objects and arrays, and texts and names: each takes as long as many numbers, and is converted afterwards.
MAX_CONTAINERS = 1 << 15
MAX_STRINGS = 1 << 17
#: In all texts.
MAX_MARKS = 1 << 21
_DECODER = msgspec.json.Decoder(dict[str, Any])


async def json_object(call: HttpCall, max_bytes: int) -> dict[str, Any]:
    """Return the body, a JSON object. Raise HttpError, InvalidRequest, MalformedMessage."""
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in _chunks(call):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            message = f"the body has more than {max_bytes} bytes"
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, needed=num_bytes, limit=max_bytes)
        chunks.append(chunk)
    found = parsed(b"".join(chunks))
    call.free_body()
    return found


async def _chunks(call: HttpCall) -> AsyncIterator[bytes]:
    try:
        async for chunk in call.request.stream():
            yield chunk
    except ClientDisconnect:
        raise Cancelled("the call ended before its body did") from None


def parsed(body: bytes) -> dict[str, Any]:
    """Return the object in `body`. Raise MalformedMessage, InvalidRequest for too many values."""
    _check_size(body)
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError) and body.lstrip()[:1] != b"{":
            raise MalformedMessage("the body must be a JSON object") from None
        raise MalformedMessage(f"the body is not JSON: {json_fault(error)}") from None


def _check_size(body: bytes) -> None:
    """Raise InvalidRequest for a body with too many values, without making an object of each."""
    if _num(b",", body) < MAX_CONTAINERS and _num(b"[{", body) < MAX_CONTAINERS:
        return
    # Texts may hold any number of commas and brackets, so count outside of them.
    _check_count("quotes and escapes", _num(b'"\\', body), MAX_MARKS)
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    _check_count("texts and names", _num(b'"', plain) // 2, MAX_STRINGS)
    outside = b"".join(plain.split(b'"')[::2])
    _check_count("values", _num(b",", outside) + 1, MAX_VALUES)
    _check_count("objects and arrays", _num(b"[{", outside), MAX_CONTAINERS)


def _num(marks: bytes, body: bytes) -> int:
    """Return how often any of the bytes occurs; `bytes.count` is slow where they are many."""
    return len(body) - len(body.translate(None, marks))


def _check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"the body has {count} {what}; {limit} are allowed", needed=count, limit=limit)
