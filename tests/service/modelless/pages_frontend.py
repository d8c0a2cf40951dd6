"""The front-end process, behind whose HTTP door are only the pages of the supervisor."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from photon_grpc.service.processes import frontend


def application(frontend: object, *, pages: Any, **others: object) -> Any:
    """Stand in for the routes of the gateway."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
        page = await pages.page(scope["path"], accept)
        headers = [(b"content-type", page.content_type.encode()), (b"content-length", str(len(page.body)).encode())]
        await send({"type": "http.response.start", "status": page.status, "headers": headers})
        await send({"type": "http.response.body", "body": page.body})

    return app


if __name__ == "__main__":
    stand_in = ModuleType("photon_grpc.gateway.app")
    vars(stand_in)["application"] = application
    sys.modules["photon_grpc.gateway.app"] = stand_in
    sys.exit(frontend.main(sys.argv))
