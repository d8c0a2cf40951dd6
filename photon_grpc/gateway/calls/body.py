"""Reading of a JSON body within limits."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from photon_grpc.errors import InvalidRequest, MalformedMessage
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.errors import HttpError

#: Parsing makes an object of every value and blocks the event loop: 10 ms for this many.
MAX_VALUES = 1 << 20
_DECODER = msgspec.json.Decoder(dict[str, Any])


async def json_object(call: HttpCall, max_bytes: int) -> dict[str, Any]:
    """Return the body, a JSON object. Raise HttpError, InvalidRequest, MalformedMessage."""
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in call.request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            message = f"the body has more than {max_bytes} bytes"
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, needed=num_bytes, limit=max_bytes)
        chunks.append(chunk)
    found = parsed(b"".join(chunks))
    call.free_body()
    return found


def parsed(body: bytes) -> dict[str, Any]:
    """Return the object in `body`. Raise MalformedMessage, InvalidRequest for too many values."""
    # A comma stands before every value but the first of its array or object. Text has some, too, but not as many.
    if (num_values := body.count(b",") + 1) > MAX_VALUES:
        message = f"the body has up to {num_values} values; {MAX_VALUES} are allowed"
        raise InvalidRequest(message, needed=num_values, limit=MAX_VALUES)
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError:
        raise MalformedMessage("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"the body is not JSON: {str(error)[:200]}") from None
