"""Connections that never acknowledge SETTINGS, so that no limit of headers binds them, and send calls whose compressed
headers unfold a thousandfold: they are hung up on, a neighbour is served, and memory has an end."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest

from tests.attack import http2
from tests.attack.figures import Figures
from tests.attack.http2 import END_STREAM, Connection
from tests.attack.neighbour import neighbour
from tests.attack.size import Size
from tests.attack.victim import Victim, forget_peak, memory_mib

STREAM_GENERATE = "/photon_grpc.v1.InferenceService/StreamGenerate"
BLOCK = http2.header_block(STREAM_GENERATE)
#: What docs/reliability.md states for one connection: the most that a front end holds above what it has at rest.
_MOST_MIB = 512
_LOOK_S = 0.05
#: A connection that is not hung up on by then is not.
_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Unfolding:
    """An entry of the dynamic table, and how often each call refers to it."""

    entry: bytes
    num_references: int
    #: Of the calls that the size says, one in so many.
    one_in: int = 1


UNFOLDINGS = {
    # 8 KB, 31 MiB unfolded.
    "entries of 3.9 KB": Unfolding(http2.new_entry("x", "v" * 3_900), 8_000),
    # 400 KB, 13 MiB unfolded, and as many objects as bytes.
    "entries of 34 bytes": Unfolding(http2.new_entry("x", ""), 400_000, one_in=50),
}


@pytest.mark.parametrize(
    ("kind", "num_connections"),
    [*((kind, 1) for kind in UNFOLDINGS), pytest.param("entries of 3.9 KB", 4, marks=pytest.mark.long_attack)],
)
def test_who_unfolds_headers_is_hung_up_on(
    attacked: Victim, size: Size, figures: Figures, kind: str, num_connections: int
) -> None:
    frontend = attacked.pids()["frontend"]
    forget_peak(frontend)
    rest_mib, num_calls = memory_mib(frontend), size.header_calls // UNFOLDINGS[kind].one_in
    with (
        attacked.unharmed(),
        neighbour(attacked.address) as beside,
        liveness(attacked) as alive_s,
        ThreadPoolExecutor(num_connections) as threads,
    ):
        floods = [partial(_flood, attacked.address, UNFOLDINGS[kind], num_calls)] * num_connections
        told = Counter(each.result() for each in [threads.submit(flood) for flood in floods])
    peak_mib = memory_mib(frontend, "VmHWM")
    figures.add(
        f"compressed headers, {kind}",
        f"{num_connections} connections, {num_calls:,} calls each",
        told,
        neighbour=f"{beside.told()}, most {max(beside.generate_s):.2f}; /healthz most {max(alive_s):.2f}",
        left_behind=f"front end: {rest_mib:,.0f} MiB, at most {peak_mib:,.0f}",
    )
    assert told == {"hung up on": num_connections}
    assert beside.failed == []
    assert max(alive_s) < size.neighbour_s
    # The limit that docs/reliability.md states: several connections are only told of.
    if num_connections == 1:
        assert peak_mib < rest_mib + _MOST_MIB
        assert max(beside.generate_s) < size.neighbour_s and max(beside.health_s) < size.neighbour_s


def _flood(address: str, unfolding: Unfolding, num_calls: int) -> str:
    call = BLOCK + http2.NEWEST_ENTRY * unfolding.num_references

    def send(connection: Connection) -> None:
        connection.send(http2.headers(1, BLOCK + unfolding.entry, END_STREAM))
        for number in range(num_calls):
            # Every other one stays open.
            if not connection.send(http2.headers(3 + 2 * number, call, END_STREAM * (number % 2))):
                return

    return _until_hung_up(address, send)


def _until_hung_up(address: str, send: Callable[[Connection], None]) -> str:
    with http2.connected(address, _LIMIT_S) as connection:
        sending = threading.Thread(target=send, args=(connection,))
        sending.start()
        try:
            return "hung up on" if connection.is_hung_up_on() else "left alone"
        finally:
            connection.vanish()
            sending.join()


@contextlib.contextmanager
def liveness(victim: Victim) -> Iterator[list[float]]:
    """How long each look at /healthz took."""
    taken_s: list[float] = []
    over = threading.Event()

    def look() -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(_LOOK_S)
            begun_s = time.monotonic()
            with urllib.request.urlopen(victim.liveness, timeout=_LIMIT_S) as answer:
                assert answer.status == 200
            taken_s.append(time.monotonic() - begun_s)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield taken_s
    finally:
        over.set()
        looking.join()


@pytest.mark.long_attack
@pytest.mark.parametrize("kind", ["without an end", "behind a message"])
def test_headers_that_only_grpc_sees_are_let_go_with_the_settings(
    attacked: Victim, figures: Figures, kind: str
) -> None:
    """No handler is told of them: what they hold is held until SETTINGS are not acknowledged for 10 s."""
    frontend = attacked.pids()["frontend"]
    rest_mib = memory_mib(frontend)
    many = http2.new_entry("x", "") + http2.NEWEST_ENTRY * 480_000

    def send(connection: Connection) -> None:
        if kind == "without an end":
            frames = http2.headers(1, BLOCK + many)
            connection.send(frames[: -(len(frames) % 16_393 or 16_393)])
            return
        for stream in range(1, 17, 2):
            connection.send(http2.headers(stream, BLOCK) + http2.headers(stream, many, END_STREAM))

    begun_s = time.monotonic()
    forget_peak(frontend)
    with attacked.unharmed(), neighbour(attacked.address) as beside:
        told = _until_hung_up(attacked.address, send)
    figures.add(
        f"headers {kind}",
        "1 connection",
        told,
        neighbour=beside.told(),
        recovery=f"{time.monotonic() - begun_s:.1f}",
        left_behind=f"front end: {rest_mib:,.0f} MiB, at most {memory_mib(frontend, 'VmHWM'):,.0f}",
    )
    assert told == "hung up on"
    assert beside.failed == []
