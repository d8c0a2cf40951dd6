"""The caller's span is sent with its calls, including resumed ones."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from photon_grpc.client import Client, SyncClient
from photon_grpc.v1 import inference_pb2 as pb

from .fake_server import FakeServer, Refusal, error_info, message, serving, serving_in_a_thread

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SPAN = NonRecordingSpan(
    SpanContext(
        0x0AF7651916CD43DD8448EB211C80319C,
        0xB7AD6B7169203331,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState([("vendor", "1")]),
    )
)
OTHER = NonRecordingSpan(SpanContext(1, 2, is_remote=False))
OK = [message("ok", start=True, finish=pb.FINISH_REASON_EOS)]


def sent_context(fake: FakeServer) -> list[tuple[str | None, str | None]]:
    return [(seen.get("traceparent"), seen.get("tracestate")) for seen in fake.metadata]


async def test_every_call_of_a_request_carries_the_span_of_its_caller() -> None:
    lost = Refusal(grpc.StatusCode.UNAVAILABLE, "gone", [error_info("ENGINE_FAILURE")])
    full = Refusal(grpc.StatusCode.UNAVAILABLE, "no", [error_info("MODEL_LOADING")])
    script = ([full], [message("a", start=True), lost], [full], OK)
    async with serving(FakeServer(*script)) as fake, Client(fake.target) as client:
        with trace.use_span(SPAN):
            stream = client.stream("x")
        with trace.use_span(OTHER):
            assert [delta.text async for delta in stream] == ["a", "ok"]
        with trace.use_span(SPAN):
            assert (await client.generate("x")).text == "ok"
    assert sent_context(fake) == [(TRACEPARENT, "vendor=1")] * 5


async def test_without_a_span_no_metadata_is_added() -> None:
    async with serving(FakeServer(OK)) as fake, Client(fake.target) as client:
        await client.generate("x")
    assert sent_context(fake) == [(None, None)]


@pytest.mark.parametrize("key", ["traceparent", "tracestate"])
async def test_metadata_of_the_caller_wins(key: str) -> None:
    async with serving(FakeServer(OK)) as fake, Client(fake.target, metadata=[(key, "own")]) as client:
        with trace.use_span(SPAN):
            await client.generate("x")
    assert [seen.get("traceparent") for seen in fake.metadata] == ["own" if key == "traceparent" else None]
    assert fake.metadata[0][key] == "own"


def test_threads_have_their_own_spans() -> None:
    with serving_in_a_thread(OK) as fake, SyncClient(fake.target) as client:
        with trace.use_span(SPAN):
            client.generate("x")
            list(client.stream("x"))
            list(client.map(["x"]))
        client.generate("x")
    assert [parent for parent, _ in sent_context(fake)] == [TRACEPARENT] * 3 + [None]


def test_a_program_without_opentelemetry_does_not_load_it() -> None:
    program = (
        "import sys; from photon_grpc.client.trace_context import with_trace_context as added;"
        "assert added([('a', 'b')]) == (('a', 'b'),); assert not any('opentelemetry' in name for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
