"""The API key of a call, `authorization: Bearer KEY`, and its scopes."""

from __future__ import annotations

from collections.abc import Sequence

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.config.api_keys import ApiKey
from photon_grpc.errors import InvalidCredentials, MissingCredentials, ScopeRequired

_SCHEME = "bearer"


def checked_key(keys: KeyRing, authorizations: Sequence[str], scopes: Sequence[str]) -> ApiKey:
    """Return the key in the only `authorization` header of a call, which has one of the scopes, if there are any.

    Raise MissingCredentials, InvalidCredentials, ScopeRequired.
    """
    if not authorizations:
        raise MissingCredentials("this server requires an API key: send `authorization: Bearer KEY`")
    scheme, _, secret = authorizations[0].partition(" ")
    key = keys.find(secret.strip())
    # A proxy in front may choose the other one of two headers.
    if key is None or len(authorizations) > 1 or scheme.lower() != _SCHEME:
        raise InvalidCredentials("the API key is not known here, or not sent as `authorization: Bearer KEY`")
    if scopes and set(scopes).isdisjoint(key.scopes):
        needed = " or ".join(map(repr, scopes))
        raise ScopeRequired(f"this method needs the scope {needed}; the key has {', '.join(sorted(key.scopes))}")
    return key
