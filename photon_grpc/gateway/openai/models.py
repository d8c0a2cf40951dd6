"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from photon_grpc.errors import ModelNotFound
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.guard import Endpoint

_METHODS = ("GET", "HEAD")
#: Who generates may see the models, as with gRPC.
_SCOPES = ("models", "generate")


class Models:
    """The endpoints."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("/v1/models", self.all, _METHODS, _SCOPES),
            Endpoint("/v1/models/{name:path}", self.one, _METHODS, _SCOPES),
        )

    async def all(self, call: HttpCall) -> Response:
        models = [
            _model(facts, name, is_default=i == 0 and name == facts.name)
            for i, facts in enumerate(self._frontend.models())
            for name in (facts.name, *facts.aliases)
        ]
        return _json({"object": "list", "data": models})

    async def one(self, call: HttpCall) -> Response:
        name = call.request.path_params["name"]
        if not name:
            raise ModelNotFound("there is no model without a name; GET /v1/models lists all", field="model")
        facts = self._frontend.model(name)
        return _json(_model(facts, name, is_default=name == self._frontend.models()[0].name))


def _model(facts: ModelFacts, name: str, *, is_default: bool) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "photon-grpc",
        "root": facts.name,
        "parent": None,
        "max_model_len": facts.max_context_tokens,
        "features": facts.features,
        "default": is_default,
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
