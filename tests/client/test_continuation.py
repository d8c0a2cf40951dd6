"""A resumed stream says whether its continuation is bit-exact, by the rule of clients/continuations.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from photon_grpc.client import Client, SyncClient
from photon_grpc.v1 import inference_pb2 as pb

from .fake_server import FakeServer, Refusal, error_info, message, serving

CASES = json.loads((Path(__file__).resolve().parents[2] / "clients" / "continuations.json").read_text())
EOS = pb.FINISH_REASON_EOS
LOST = Refusal(grpc.StatusCode.UNAVAILABLE, "gone", [error_info("ENGINE_FAILURE")])


def by(version: str, *messages: pb.StreamGenerateResponse) -> list[Any]:
    """Return the messages of one server; ids are their places."""
    messages[0].start.numerics_version = version
    for place, each in enumerate(messages):
        each.deltas[0].token_ids.append(place)
    return list(messages)


def cut(before: str, after: str) -> FakeServer:
    first = [*by(before, message("a", start=True), message("b")), LOST]
    return FakeServer(first, by(after, message("c", start=True, finish=EOS)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['before']}-{case['after']}")
async def test_a_continuation_is_bit_exact_as_the_rule_says(
    case: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(cut(case["before"], case["after"])) as fake, Client(fake.target) as client:
        stream = client.stream("x")
        before = await anext(stream)
        assert stream.is_bit_exact
        texts = [before.text, *[delta.text async for delta in stream]]
    assert "".join(texts) == "abc" and stream.is_bit_exact is case["bit_exact"]
    assert stream.start is not None and stream.start.numerics_version == case["before"]
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["r-1" in line.message for line in lines] == ([] if case["bit_exact"] else [True])


async def test_every_continuation_is_compared_with_the_call_before() -> None:
    script = (
        [*by("a1", message("a", start=True)), LOST],
        [*by("b2", message("b", start=True)), LOST],
        by("b2", message("c", start=True, finish=EOS)),
    )
    async with serving(FakeServer(*script)) as fake, Client(fake.target) as client:
        stream = client.stream("x")
        assert "".join([delta.text async for delta in stream]) == "abc"
    assert not stream.is_bit_exact


async def test_a_stream_of_one_call_is_bit_exact() -> None:
    for version in ("", "a1", "fast-a1"):
        answer = by(version, message("a", start=True, finish=EOS))
        async with serving(FakeServer(answer)) as fake, Client(fake.target) as client:
            stream = client.stream("x")
            assert [delta.text async for delta in stream] == ["a"]
            assert stream.is_bit_exact and (await client.generate("x")).is_bit_exact


def test_threads_are_told_as_well() -> None:
    with SyncClient("127.0.0.1:1") as client:
        assert client.stream("x").is_bit_exact
