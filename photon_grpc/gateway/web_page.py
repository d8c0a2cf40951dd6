"""GET / and GET /page/NAME: the files of the web page."""

from __future__ import annotations

from starlette.responses import Response

from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.guard import Endpoint
from photon_grpc.gateway.page import FILES, HEADERS


def page_endpoints() -> list[Endpoint]:
    """Return the endpoints. Files hold nothing secret, so no key is needed."""
    return [Endpoint(path, _file, ("GET", "HEAD"), is_open=True) for path in FILES]


async def _file(call: HttpCall) -> Response:
    content, content_type = FILES[call.route]
    # The files change with the release, and the browser would keep them for as long as it likes.
    return Response(content, 200, {**HEADERS, "content-type": content_type, "cache-control": "no-cache"})
