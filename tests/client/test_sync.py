"""The same calls for threads without an event loop, and for threads with one."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from photon_grpc.client import SyncClient
from photon_grpc.errors import Closed
from photon_grpc.v1 import inference_pb2 as pb
from tests.notebook import run_cells

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


def test_many_threads_at_a_time(fake: FakeServer) -> None:
    with SyncClient(fake.target) as client, ThreadPoolExecutor(16) as pool:

        def ask(number: int) -> str:
            if number % 2:
                return "".join(delta.text for delta in client.stream("x"))
            return client.generate("x").text

        assert list(pool.map(ask, range(64))) == ["a", "ab"] * 32


async def test_a_client_works_inside_the_loop_of_a_notebook(fake: FakeServer) -> None:
    variables = await run_cells(
        "import asyncio; from photon_grpc.client import SyncClient; client = SyncClient(target)",
        "whole = client.generate('x').text",
        "streamed = [delta.text for delta in client.stream('x')]",
        "mapped = [result.text for result in client.map(['x', 'y'])]",
        "for delta in client.stream('x'): break",
        "both = await asyncio.gather(*[asyncio.to_thread(client.generate, 'x') for _ in range(8)])",
        "with client.multiplex(): pass",
        "client.close()",
        target=fake.target,
    )
    assert (variables["whole"], variables["streamed"], variables["mapped"]) == ("a", ["a", "b"], ["a", "a"])
    assert [result.text for result in variables["both"]] == ["a"] * 8


def test_a_client_held_only_by_its_stream_stays_open(fake: FakeServer) -> None:
    texts = []
    for delta in SyncClient(fake.target).stream("x"):
        gc.collect()
        texts.append(delta.text)
    assert texts == ["a", "b"]


def test_a_dropped_client_ends_its_thread(fake: FakeServer) -> None:
    before = threading.active_count()
    client = SyncClient(fake.target)
    client.generate("x")
    assert threading.active_count() == before + 1
    del client
    gc.collect()
    assert threading.active_count() == before


def test_a_closed_client_refuses(fake: FakeServer) -> None:
    client = SyncClient(fake.target)
    client.close()
    client.close()
    with pytest.raises(Closed):
        client.generate("x")


def test_closing_ends_the_calls_of_other_threads() -> None:
    with serving_in_a_thread(["hang"]) as fake, ThreadPoolExecutor(1) as pool:
        client = SyncClient(fake.target)
        pending = pool.submit(client.generate, "x")
        while not fake.requests:
            pass
        client.close()
        with pytest.raises((Closed, asyncio.CancelledError)):
            pending.result(30)


def test_a_client_from_before_a_fork_says_so() -> None:
    program = """
import os
from photon_grpc.client import SyncClient
client = SyncClient("127.0.0.1:1")
if not (child := os.fork()):
    try:
        client.is_ready()
    except RuntimeError as error:
        print(error, flush=True)
    client.close()
    raise SystemExit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
client.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "this client was made before the process forked; make one in each process\n3\n"
