"""The limit of a call's headers, and the end of a connection whose client ignores it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.calls import metadata
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.guard import CallRules
from photon_grpc.v1 import inference_pb2_grpc
from tests.attack import http2
from tests.attack.http2 import END_STREAM, Connection, connected
from tests.server.fake_frontend import ASK, FakeFrontend, for_ever, raw, serving, until
from tests.server.keys import write_keys

GENERATE = "/photon_grpc.v1.InferenceService/Generate"
MESSAGE = ASK.SerializeToString()
#: An entry of 3.9 KB, and 8,000 references to it: 31 MiB in 8 KB.
LARGE = ("x", "v" * 3_900, 8_000)
#: An entry of 34 bytes, and 40,000: 1.3 MiB.
SMALL = ("x", "", 40_000)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with serving(FakeFrontend()) as address:
        yield address


async def is_served(address: str) -> bool:
    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        response = await inference_pb2_grpc.InferenceServiceStub(channel).Generate(ASK, timeout=30)
        return bool(response.outputs[0].text)


def flood(connection: Connection, path: str, name: str, value: str, num_references: int) -> None:
    """Send an entry, then calls that refer to it, until the server closes; never acknowledge SETTINGS."""
    block = http2.header_block(path)
    connection.send(http2.headers(1, block + http2.new_entry(name, value), END_STREAM))
    for stream in itertools.islice(itertools.count(3, 2), 400):
        if not connection.send(http2.headers(stream, block + http2.NEWEST_ENTRY * num_references, END_STREAM)):
            return


@pytest.mark.parametrize("path", [GENERATE, "/a.B/C"])
@pytest.mark.parametrize("entry", [LARGE, SMALL], ids=["large", "small"])
async def test_a_client_that_floods_without_acknowledging_is_disconnected(
    address: str, entry: tuple[str, str, int], path: str
) -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as threads, connected(address) as connection:
        flooding = loop.run_in_executor(threads, flood, connection, path, *entry)
        assert await loop.run_in_executor(threads, connection.is_hung_up_on)
        await flooding
    assert await is_served(address)


async def test_a_flood_needs_no_key(tmp_path: Path) -> None:
    keys = KeyRing(str(write_keys(tmp_path / "keys.toml")))
    async with serving(FakeFrontend(), rules=CallRules(FailureLog(), keys=ApiKeys(keys, ()))) as address:
        with ThreadPoolExecutor(2) as threads, connected(address) as connection:
            loop = asyncio.get_running_loop()
            flooding = loop.run_in_executor(threads, flood, connection, GENERATE, *LARGE)
            assert await loop.run_in_executor(threads, connection.is_hung_up_on)
            await flooding


@pytest.mark.parametrize(("num_bytes", "expected"), [(8_000, "OK"), (15_000, "OK"), (17_000, "RESOURCE_EXHAUSTED")])
async def test_the_metadata_limit_is_a_single_number(address: str, num_bytes: int, expected: str) -> None:
    """By default gRPC refuses headers above 8 KiB at random."""
    async with grpc.aio.insecure_channel(address) as channel:
        for _ in range(10):
            call = raw(channel, GENERATE)(MESSAGE, metadata=[("baggage", "v" * num_bytes)], timeout=30)
            assert (await call.code()).name == expected


BLOCK = http2.header_block(GENERATE)


@pytest.mark.parametrize(
    "headers",
    [
        BLOCK + http2.new_entry("x", "v" * 3_900) + http2.NEWEST_ENTRY * 4_000,
        BLOCK + http2.new_entry("x", "") + http2.NEWEST_ENTRY * 4_000,
        http2.header_block(GENERATE, x="v" * 70_000),
        http2.header_block(GENERATE, x="v" * 16_300, y="v" * 16_300, z="v" * 16_300),
        http2.header_block(GENERATE, x="v" * 16_000, y="v" * 16_300, z="v" * 16_300),
    ],
    ids=["large entries", "small entries", "one of 70 KB", "three", "two"],
)
async def test_a_client_that_acknowledges_keeps_its_connection(address: str, headers: bytes) -> None:
    """gRPC refuses only the call, and Python sees little more of its headers than the limit."""

    def speak() -> bool:
        with connected(address) as connection:
            frames = connection.frames()
            next(found for found in frames if found.kind == http2.SETTINGS and found.flags & http2.ACK)
            # The server sends this answer after it has received our acknowledgement.
            connection.call(1, GENERATE, http2.grpc_message(MESSAGE))
            next(found for found in frames if found.stream == 1 and found.ends_stream)
            connection.send(http2.headers(3, headers, END_STREAM))
            next(found for found in frames if found.stream == 3 and found.ends_stream)
            connection.call(5, GENERATE, http2.grpc_message(MESSAGE))
            return any(found.stream == 5 and found.kind == http2.DATA for found in frames)

    assert await asyncio.to_thread(speak)


def test_headers_are_counted_as_http2_does() -> None:
    """The number is what gRPC leaves of a call that it refuses."""
    full = [("n" * 100, "v" * (2 * metadata.MAX_BYTES - 132))]
    assert metadata.headers_of(full) is not None and metadata.headers_of(None) == {}
    assert metadata.headers_of([*full, ("", "")]) is None
    assert metadata.headers_of([("x", "")] * (2 * metadata.MAX_BYTES // 33 + 1)) is None


async def test_more_calls_than_seats_and_queue_run_on_one_connection() -> None:
    """gRPC's limit of streams would make them wait silently in their client; QUEUE_FULL is the server's answer."""
    frontend = FakeFrontend()
    frontend.script = (for_ever,)
    num_calls = 1_400
    async with serving(frontend) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.StreamGenerate(ASK) for _ in range(num_calls)]
        await until(lambda: len(frontend.asks) >= num_calls, 60)
        for call in calls:
            call.cancel()
