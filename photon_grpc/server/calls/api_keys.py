"""Admission by API key, `authorization: Bearer KEY`. Every method and path is denied by default.

A call is checked before its message is received.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import grpc

from photon_grpc.access.credentials import checked_key
from photon_grpc.access.key_ring import KeyRing
from photon_grpc.admin.v1 import admin_pb2
from photon_grpc.config.api_keys import ApiKey
from photon_grpc.server.calls.call import Call
from photon_grpc.server.wire import descriptors
from photon_grpc.v1 import inference_pb2, model_pb2

#: Any key is enough.
_NO_SCOPE: tuple[str, ...] = ()
_MODELS = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
#: Service -> the scopes of which it needs one. Any other service needs _SCOPE_OF_OTHERS.
_SCOPES = {
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name: ("generate",),
    _MODELS: ("models",),
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name: ("admin",),
    **dict.fromkeys((descriptors.HEALTH, descriptors.LOAD_REPORTS, *descriptors.REFLECTION), _NO_SCOPE),
}
_SCOPE_OF_OTHERS = ("admin",)
#: Who generates may read the features: clients ask for them before they send a field that an older server ignores.
_SCOPES_OF_METHODS = {f"/{_MODELS}/GetModel": ("models", "generate")}

#: Value of --api-keys-exempt -> the services that it exempts.
_EXEMPTIONS = {
    "health": (descriptors.HEALTH,),
    "reflection": descriptors.REFLECTION,
    "load-reports": (descriptors.LOAD_REPORTS,),
    "none": (),
}


class ApiKeys:
    """The guard's check of API keys."""

    def __init__(self, keys: KeyRing, exempt: Iterable[str], services: Iterable[str] = ()) -> None:
        """Take the keys, the values of --api-keys-exempt in `exempt`, and the `services` that are served too."""
        self._keys = keys
        self._scopes = {**_SCOPES, **{name: (f"service:{name}",) for name in services}}
        self._exempt = frozenset(service for name in exempt for service in _EXEMPTIONS[name])

    def admit(self, call: Call, details: grpc.HandlerCallDetails, *, is_served: bool) -> None:
        """Set the call's owner. Raise MissingCredentials, InvalidCredentials, ScopeRequired."""
        service = details.method.removeprefix("/").rpartition("/")[0]
        if is_served and service in self._exempt:
            return
        scopes = _SCOPES_OF_METHODS.get(details.method) or self._scopes.get(service, _SCOPE_OF_OTHERS)
        call.check_key = partial(self._checked_key, details, scopes if is_served else _NO_SCOPE)
        call.owner = call.check_key().name

    def _checked_key(self, details: grpc.HandlerCallDetails, scopes: tuple[str, ...]) -> ApiKey:
        """Return the call's key. Raise MissingCredentials, InvalidCredentials, ScopeRequired."""
        headers = [str(value) for name, value in details.invocation_metadata or () if name == "authorization"]
        return checked_key(self._keys, headers, scopes)
