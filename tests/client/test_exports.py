"""The names of `photon_grpc.client`, of which those that need grpc are resolved on first use."""

from __future__ import annotations

import pytest

from photon_grpc import client
from photon_grpc.client.client import Client


def test_every_exported_name_exists_and_an_unknown_one_does_not() -> None:
    assert all(getattr(client, name) for name in client.__all__)
    assert client.Client is Client
    assert set(client.__all__) <= set(dir(client))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = client.Nothing
