"""The same calls for one thread that has no event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from photon_grpc.client import SyncClient
from photon_grpc.v1 import inference_pb2 as pb

from .fake_server import FakeServer, message, serving_in_a_thread


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving_in_a_thread([message("a", start=True), message("b", finish=pb.FINISH_REASON_EOS)]) as fake:
        yield fake


def test_stream_and_generate(fake: FakeServer) -> None:
    with SyncClient(fake.target) as client:
        client.wait_until_ready(10)
        stream = client.stream("x", max_tokens=2)
        assert [delta.text for delta in stream] == ["a", "b"]
        assert stream.usage is not None
        assert stream.usage.output_tokens == 3
        assert client.generate("x").text == "a"
        assert client.model().name == "demo"
        assert client.tokenize("x") == (1, 2, 3)


def test_leaving_a_stream_early(fake: FakeServer) -> None:
    with SyncClient(fake.target) as client:
        for delta in client.stream("x"):
            assert delta.text == "a"
            break
        assert client.generate("x").text == "a"
