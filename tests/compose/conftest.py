"""A server above an LLM, for tests of whole programs over the wire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from photon_grpc import LLM
from tests.compose.over_grpc import over_grpc


@pytest.fixture(scope="module")
def target(llm: LLM) -> Iterator[str]:
    with over_grpc(llm) as address:
        yield address
