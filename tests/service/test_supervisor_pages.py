"""Pages of the supervisor in a front end, and the commands that arrive between them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from photon_grpc.bridge.control import MAX_PAGE_BYTES, ControlChannel, Drain, Link, PageAnswer, PageWanted, Stop
from photon_grpc.errors import Unavailable
from photon_grpc.service.endpoints.metrics import MetricsEndpoint
from photon_grpc.service.endpoints.pages import Page
from photon_grpc.service.endpoints.service_metrics import NoMetrics, ServiceState, answer
from photon_grpc.service.processes.child import ChildContext
from photon_grpc.service.processes.counts_report import NoReport
from photon_grpc.service.processes.supervisor_commands import SupervisorCommands
from photon_grpc.service.processes.supervisor_pages import MAX_WANTED, SupervisorPages


def commands(control: ControlChannel, pages: SupervisorPages, connect: Any = None) -> SupervisorCommands:
    context: Any = ChildContext(control, Any, [], Any, ())  # type: ignore[arg-type]
    link: Any = SimpleNamespace(connect=connect)
    return SupervisorCommands(context, link, NoReport(), pages)


class Pair:
    """A front end and a supervisor, both on this event loop."""

    def __init__(self, timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        self.supervisor = ControlChannel(ours)
        self.supervisor.set_blocking(False)
        control = ControlChannel(theirs, max_bytes=MAX_PAGE_BYTES + 1024)
        self.pages = SupervisorPages(control, timeout_s=timeout_s)
        self.commands = commands(control, self.pages)

    async def wanted(self, count: int) -> list[PageWanted]:
        """Return as many messages of the front end."""
        found: list[Any] = []
        while len(found) < count:
            await asyncio.sleep(0)
            found += self.supervisor.receive()
        return found


@contextlib.asynccontextmanager
async def joined(timeout_s: float = 60.0) -> AsyncIterator[Pair]:
    pair = Pair(timeout_s)
    yield pair
    pair.supervisor.close()
    await pair.commands.until_stop(0)


def answered(wanted: PageWanted, body: bytes) -> PageAnswer:
    return PageAnswer(wanted.number, 200, "text/plain", body)


async def test_each_caller_gets_the_page_that_it_asked_for() -> None:
    async with joined() as pair:
        asking = [asyncio.create_task(pair.pages.page(path, "text/plain")) for path in ("/metrics", "/readyz")]
        for message in reversed(await pair.wanted(2)):
            pair.supervisor.send(answered(message, message.path.encode()))
        assert await asyncio.gather(*asking) == [
            Page(b"/metrics", "text/plain", 200),
            Page(b"/readyz", "text/plain", 200),
        ]


async def test_callers_of_one_page_share_it_and_one_that_leaves_takes_nothing_from_the_others() -> None:
    async with joined() as pair:
        asking = [asyncio.create_task(pair.pages.page("/metrics", "a")) for _ in range(100)]
        (message,) = await pair.wanted(1)
        asking.pop().cancel()
        pair.supervisor.send(answered(message, b"x"))
        assert {page.body for page in await asyncio.gather(*asking)} == {b"x"}
        await asyncio.sleep(0)
        assert pair.supervisor.receive() == []


async def test_an_answer_that_nobody_asked_for_is_ignored() -> None:
    async with joined() as pair:
        asking = asyncio.create_task(pair.pages.page("/metrics", ""))
        (message,) = await pair.wanted(1)
        pair.pages.answered(PageAnswer(message.number + 7, 200, "text/plain", b"unasked"))
        pair.pages.answered(answered(message, b"x"))
        pair.pages.answered(answered(message, b"again"))
        assert (await asking).body == b"x"


async def test_a_page_of_megabytes_arrives_whole() -> None:
    async with joined() as pair:
        asking = asyncio.create_task(pair.pages.page("/metrics", ""))
        (message,) = await pair.wanted(1)
        pair.supervisor.send(answered(message, b"x" * MAX_PAGE_BYTES))
        assert (await asking).body == b"x" * MAX_PAGE_BYTES


async def test_a_supervisor_that_does_not_answer_is_asked_no_more_than_a_few_times() -> None:
    async with joined(timeout_s=0.02) as pair:
        for _ in range(2):
            asking = [pair.pages.page("/metrics", f"text/{number}") for number in range(MAX_WANTED + 1)]
            errors = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(error, Unavailable) and error.retry_after_s for error in errors)
            assert str(errors[-1]) == "4 pages of /metrics are being made; the limit is 4; try again"
            assert "within 0.02 s" in str(errors[0])
        wanted = await pair.wanted(MAX_WANTED)
        assert len(wanted) == MAX_WANTED
        # Late answers are of use to those who still wait, and make room.
        for message in wanted:
            pair.supervisor.send(answered(message, b"late"))
        await asyncio.sleep(0.05)
        pair.pages._timeout_s = 60.0
        asking_again = asyncio.create_task(pair.pages.page("/metrics", "text/0"))
        (message,) = await pair.wanted(1)
        pair.supervisor.send(answered(message, b"new"))
        assert (await asking_again).body == b"new"


async def test_probes_are_answered_while_others_ask_for_too_much() -> None:
    async with joined() as pair:
        scrapes = [asyncio.create_task(pair.pages.page("/metrics", str(number))) for number in range(2 * MAX_WANTED)]
        probes = [asyncio.create_task(pair.pages.page("/readyz", str(number))) for number in range(100)]
        wanted = await pair.wanted(MAX_WANTED + 1)
        assert [message.path for message in wanted] == ["/metrics"] * MAX_WANTED + ["/readyz"]
        for message in wanted:
            pair.supervisor.send(answered(message, b"x"))
        assert {page.body for page in await asyncio.gather(*probes)} == {b"x"}
        ends = await asyncio.gather(*scrapes, return_exceptions=True)
        assert sum(isinstance(end, Unavailable) for end in ends) == MAX_WANTED


async def test_a_long_header_is_cut_before_it_could_burst_the_control_socket() -> None:
    async with joined(timeout_s=0.02) as pair:
        with pytest.raises(Unavailable):
            await pair.pages.page("/metrics", "x" * 1_000_000)
        (message,) = await pair.wanted(1)
        assert len(message.accept) == 1024


async def test_without_a_supervisor_there_is_no_page() -> None:
    async with joined() as pair:
        pair.supervisor.close()
        with pytest.raises(Unavailable, match="reads nothing"):
            await pair.pages.page("/readyz", "")


async def test_pages_are_answered_while_the_front_end_drains() -> None:
    async with joined() as pair:
        pair.supervisor.send(Drain(7.0))
        assert await pair.commands.until_drain() == 7.0
        asking = asyncio.create_task(pair.pages.page("/readyz", ""))
        (message,) = await pair.wanted(1)
        pair.supervisor.send(PageAnswer(message.number, 503, "text/plain", b"NOT_SERVING\n"))
        assert (await asking).status == 503
        pair.supervisor.send(Stop(3))
        assert await pair.commands.until_stop(0) == 3


async def test_the_end_of_the_supervisor_drains_and_stops_the_front_end() -> None:
    async with joined() as pair:
        pair.supervisor.close()
        assert await pair.commands.until_drain() == 0.0
        assert await pair.commands.until_stop(5) == 5


async def test_a_command_that_cannot_be_obeyed_ends_the_front_end() -> None:
    async def connect(sock: socket.socket) -> None:
        raise ValueError("no such socket")

    ours, theirs = socket.socketpair()
    supervisor, control = ControlChannel(ours), ControlChannel(theirs)
    obeying = commands(control, SupervisorPages(control), connect)

    with ours.dup() as passed:
        supervisor.send(Link(), passed)
    with pytest.raises(ValueError, match="no such socket"):
        await obeying.until_drain()
    supervisor.close()
    control.close()


def served() -> ServiceState:
    return ServiceState(True, None, "m", 1, 0, 0)


@pytest.mark.parametrize(
    ("path", "status", "begins"),
    [
        ("/metrics", 200, b"# HELP photon_ready"),
        ("/health", 200, b"SERVING\n"),
        ("/readyz", 200, b"SERVING\n"),
        ("/healthz", 200, b"SERVING\n"),
        ("/secrets", 404, b"the pages are /metrics, /healthz, /readyz, /health\n"),
    ],
)
def test_the_supervisor_answers_with_the_pages_of_metrics_listen(path: str, status: int, begins: bytes) -> None:
    found = answer(MetricsEndpoint([], served), PageWanted(3, path, "*/*"))
    assert (found.number, found.status, found.body[: len(begins)]) == (3, status, begins)


def test_a_page_that_is_too_long_for_the_socket_is_refused_with_both_numbers() -> None:
    metrics: Any = SimpleNamespace(page=lambda path, accept: Page(b"x" * (MAX_PAGE_BYTES + 1)))
    found = answer(metrics, PageWanted(3, "/metrics", ""))
    assert found.status == 500
    assert f"the page has {MAX_PAGE_BYTES + 1} bytes; the limit here is {MAX_PAGE_BYTES}" in found.body.decode()


def test_without_an_http_server_nothing_is_there_to_ask_for() -> None:
    assert answer(NoMetrics(), PageWanted(1, "/metrics", "")).status == 404
