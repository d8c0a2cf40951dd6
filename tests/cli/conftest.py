"""The verbs are called in this process: what they set for gRPC in its environment stays in their tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def grpc_verbosity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")
    monkeypatch.delenv("GRPC_VERBOSITY")
