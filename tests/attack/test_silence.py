"""One host holds open whatever can be held, in silence: calls of every kind, messages that lack their last byte.
Another host is served, and memory has an end."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon_grpc.client import Client
from photon_grpc.server.standard.load_report import OrcaLoadReport, OrcaLoadReportRequest
from tests.attack import http2
from tests.attack.figures import Figures
from tests.attack.http2 import ACK, DATA, SETTINGS, WINDOW_UPDATE, Connection, frame
from tests.attack.neighbour import neighbour
from tests.attack.size import Size
from tests.attack.victim import Belongings, Victim, forget_peak, memory_mib

#: Loopback has many addresses: this is another host.
HOSTILE = "127.0.0.2"
GENERATE = "/photon_grpc.v1.InferenceService/Generate"
MULTIPLEX = "/photon_grpc.v1.InferenceService/MultiplexGenerate"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
WATCH = "/grpc.health.v1.Health/Watch"
LOAD_REPORTS = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
#: What is sent on each call, which stays open: nothing, half a message, a request that is answered for ever.
SILENT = {MULTIPLEX: b"", REFLECTION: b"", GENERATE: b"\0\0\0\0\x09half", WATCH: b"\0" * 5, LOAD_REPORTS: b"\0" * 5}
_CALLS_PER_CONNECTION = 64
_HELD_BYTES = 31 << 20
_FRAME_BYTES = 1 << 14
#: What docs/operations.md states.
_MOST_MIB = 1_280


@pytest.mark.parametrize("path", SILENT)
async def test_calls_that_are_held_open_leave_others_served(
    attacked: Victim, size: Size, figures: Figures, path: str
) -> None:
    before = Belongings(attacked)
    with attacked.unharmed(), neighbour(attacked.address) as beside:
        with contextlib.ExitStack() as hostile:
            for first in range(0, size.silent, _CALLS_PER_CONNECTION):
                connection = hostile.enter_context(http2.connected(attacked.address, source=HOSTILE))
                _fall_silent(connection, path, min(_CALLS_PER_CONNECTION, size.silent - first))
            await asyncio.wait_for(_served(attacked.address), 30)
        before.return_to_what_they_were()
    method = path.rpartition("/")[2]
    figures.add(
        f"silent {method}", f"{size.silent:,}", "others are served", neighbour=beside.told(), left_behind=before.told()
    )
    assert beside.failed == []
    assert max(beside.generate_s) < size.neighbour_s


def _fall_silent(connection: Connection, path: str, num_calls: int) -> None:
    """The server has taken the calls when it answers the one behind them."""
    for number in range(num_calls):
        connection.open(2 * number + 1, path, SILENT[path])
    last = 2 * num_calls + 1
    connection.call(last, "/nothing/Nothing", None)
    assert connection.is_answered(last)


async def _served(address: str) -> None:
    """One call of every kind that was held open."""
    async with Client(address, retries=0, resume=False) as client, client.multiplex() as many:
        assert (await many.generate("def", max_tokens=1)).usage.output_tokens == 1
        assert (await client.generate("def", max_tokens=1)).usage.output_tokens == 1
    async with grpc.aio.insecure_channel(address) as channel:
        assert await health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()).read()
        report = channel.unary_stream(LOAD_REPORTS, OrcaLoadReportRequest.SerializeToString, OrcaLoadReport.FromString)
        assert await report(OrcaLoadReportRequest()).read()
        listed = channel.stream_stream(REFLECTION)(iter([b"\x3a\x01*"]))
        assert b"photon_grpc" in await listed.read()


@pytest.mark.parametrize("paths", [(MULTIPLEX,), (REFLECTION,), (MULTIPLEX, REFLECTION, GENERATE)])
async def test_messages_that_lack_their_last_byte_have_an_end(
    attacked: Victim, size: Size, figures: Figures, paths: tuple[str, ...]
) -> None:
    frontend = attacked.pids()["frontend"]
    forget_peak(frontend)
    rest_mib = memory_mib(frontend)
    told: Counter[str] = Counter()
    held = _held(attacked.address, [path for path in paths for _ in range(size.held)], told)
    with attacked.unharmed(), neighbour(attacked.address) as beside, held:
        await asyncio.wait_for(_served(attacked.address), 30)
    peak_mib = memory_mib(frontend, "VmHWM")
    figures.add(
        f"held messages of 31 MiB, {', '.join(path.rpartition('/')[2] for path in paths)}",
        f"{size.held} each",
        told,
        neighbour=beside.told(),
        left_behind=f"front end: {rest_mib:,.0f} MiB, at most {peak_mib:,.0f}",
    )
    assert beside.failed == []
    assert max(beside.generate_s) < size.neighbour_s
    assert peak_mib < rest_mib + _MOST_MIB


@contextlib.contextmanager
def _held(address: str, paths: list[str], told: Counter[str]) -> Iterator[None]:
    """All that the server takes of a message on each path; within the block nothing more comes."""
    connections = [Connection(address, source=HOSTILE) for _ in paths]
    ends: list[str] = []
    threads = [
        threading.Thread(target=lambda c=connection, p=path: ends.append(_send_but_a_byte(c, p)), daemon=True)
        for connection, path in zip(connections, paths, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        yield
    finally:
        for connection in connections:
            connection.vanish()
    told.update(ends)


def _send_but_a_byte(connection: Connection, path: str) -> str:
    """Within the server's windows, as the polite do: `held`, `ended` by the server, or `waits` for a window."""
    connection.open(1, path)
    unsent = struct.pack(">BI", 0, _HELD_BYTES) + bytes(_HELD_BYTES - 1)
    windows, begin = {0: 65_535, 1: 65_535}, 0
    while begin < len(unsent):
        room = min(_FRAME_BYTES, *windows.values())
        if room <= 0:
            if (ended := _wait_for_a_window(connection, windows)) is not None:
                return ended
            continue
        chunk = unsent[begin : begin + room]
        if not connection.send(frame(DATA, 0, 1, chunk)):
            return "ended"
        begin += len(chunk)
        for stream in windows:
            windows[stream] -= len(chunk)
    return "held"


def _wait_for_a_window(connection: Connection, windows: dict[int, int]) -> str | None:
    try:
        for found in connection.frames():
            if found.kind == WINDOW_UPDATE:
                windows[found.stream] += struct.unpack(">I", found.payload)[0]
                if min(windows.values()) > 0:
                    return None
            elif found.kind == SETTINGS and not found.flags & ACK:
                windows[1] += sum(
                    value - 65_535 for kind, value in struct.iter_unpack(">HI", found.payload) if kind == 4
                )
            elif found.ends_stream:
                return "ended"
    except TimeoutError:
        return "waits"
    return "ended"
