"""A front-end process: gRPC outside, the bridge inside. torch never gets in here. Started by the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from photon_grpc.bridge.client import BridgeClient
from photon_grpc.bridge.codec import MAX_STEP_BYTES
from photon_grpc.bridge.control import (
    Begin,
    Bound,
    ControlChannel,
    ControlMessage,
    Drain,
    Drained,
    DrainWanted,
    Link,
    Serving,
    Stop,
)
from photon_grpc.bridge.heartbeat import SharedHeartbeat
from photon_grpc.compose.access import access
from photon_grpc.compose.observation import observation
from photon_grpc.compose.served_model import read_served_model
from photon_grpc.compose.tracing import tracing
from photon_grpc.errors import ConfigError, StartupError
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.readiness import State
from photon_grpc.frontend.record import Observers
from photon_grpc.server.admin_listener import AdminListener
from photon_grpc.server.observe import request_log
from photon_grpc.server.server import Server
from photon_grpc.service.logs.log_pipe import log_bare_lines, log_to_stderr
from photon_grpc.service.processes import address_space
from photon_grpc.service.processes.child import ChildContext, enter_child
from photon_grpc.service.processes.counts_report import CountsReport, NoReport, counts_report
from photon_grpc.service.processes.encoder_client import EncoderProcess

log = logging.getLogger(__name__)

#: Tokenizing and templates run here, beside the loop; more threads than cores gain nothing.
_MAX_POOL_THREADS = 4
#: Interval of the event loop's beats, and the silence that it may keep.
_BEAT_INTERVAL_S = 0.5
_LONGEST_TURN_S = 5.0
#: mallopt(3).
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 256 * 1024


def main(argv: list[str]) -> int:
    """Return the exit code: 0 after a drain or when the supervisor is gone, CANNOT_START after a StartupError."""
    context = enter_child(argv)
    _map_large_blocks()
    config, name = context.begin.config.server, f"front end {context.begin.index}"
    log_to_stderr(config.log_level, name, log_format=config.log_format)
    log_bare_lines(request_log.LOGGER, log_format=config.log_format)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(context))
    except StartupError as error:
        return context.refuse(str(error))
    except Exception as error:
        if not address_space.is_met_by(error):
            raise
        return context.refuse(address_space.told(name))
    return 0


async def _serve(context: ChildContext) -> None:
    control, begin = context.control, context.begin
    config = begin.config
    link = BridgeClient(max_frame_bytes=MAX_STEP_BYTES)
    model = read_served_model(config)
    async with contextlib.AsyncExitStack() as stack:
        num_threads = min(os.cpu_count() or 1, _MAX_POOL_THREADS)
        pool = stack.enter_context(ThreadPoolExecutor(num_threads, "frontend"))
        threads = ThreadEncoder(model, pool, max_at_once=2 * num_threads)
        encoder = await stack.enter_async_context(EncoderProcess(threads, begin).running())
        allowed = await stack.enter_async_context(access(config.server))
        observed = observation(config.server)
        replica_id = config.server.replica_id or _own_id()
        traced = stack.enter_context(tracing(config.server, replica_id))
        rules = observed.rules(replica_id, allowed.keys)
        frontend = Frontend(
            link=link,
            model=model,
            encoder=encoder,
            seed=_own_seed(config.model.seed, begin.index),
            shares=allowed.shares,
            observers=Observers((*observed.observers, *traced)),
        )
        frontend.on_state(lambda state: _report(control, Serving(state is State.SERVING)))
        server = Server(
            frontend,
            config=config.server,
            rules=rules,
            certificates=allowed.certificates,
        )
        addresses = await server.start(begin.addresses, reuse_port=begin.reuse_port)
        # gRPC leaves a traceback where a server that listens is let go of; one that has drained is not drained again.
        stack.push_async_callback(server.drain_and_stop, 0.0)
        admin = AdminListener(
            frontend,
            drain=lambda timeout_s: _report(control, DrainWanted(timeout_s)),
            rules=rules,
            certificates=allowed.certificates,
        )
        admin_address = await _listen_for_operators(admin, begin)
        _keep_beating(context.heartbeat)
        _report(control, Bound(addresses, frontend.model("").name, admin_address))
        gc.freeze()
        report = counts_report(control, frontend, observed.counts)
        reporting = asyncio.create_task(report.keep())
        commands = SupervisorCommands(context, link, report)
        num_left = await server.drain_and_stop(await commands.until_drain())
        _report(control, Drained(num_left))
        await admin.stop(await commands.until_stop(num_left))
        reporting.cancel()
        report.tell()
        link.close()


async def _listen_for_operators(admin: AdminListener, begin: Begin) -> str:
    """Return the address of AdminService; empty where it is not served. Raise ConfigError for one that was asked
    for."""
    if not begin.admin:
        return ""
    try:
        return await admin.start(begin.admin)
    except ConfigError as error:
        if begin.config.server.admin_listen:
            raise
        # No place for a socket that was not asked for.
        log.warning("no admin service: %s", error)
        return ""


def _map_large_blocks() -> None:
    """Large blocks go back to the system when they are freed. glibc else keeps them once it has seen a few: gigabytes,
    after messages of 32 MiB."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def _keep_beating(heartbeat: SharedHeartbeat) -> None:
    """With every beat the event loop itself says that it still turns."""
    heartbeat.beat(_LONGEST_TURN_S)
    asyncio.get_running_loop().call_later(_BEAT_INTERVAL_S, _keep_beating, heartbeat)


class SupervisorCommands:
    """The supervisor's messages, read on the event loop."""

    def __init__(self, context: ChildContext, link: BridgeClient, report: CountsReport | NoReport) -> None:
        self._control = context.control
        self._link = link
        self._report = report
        self._said = context.said
        self._news = asyncio.Event()
        #: One for all that wait for something of it: nothing is lost between them.
        self._messages = self._read()

    async def until_drain(self) -> float:
        """Join the engines that the supervisor brings, until it says drain: seconds for running requests (0: it is
        gone)."""
        async for message in self._messages:
            if isinstance(message, Link):
                await self._link.connect(self._control.take_socket())
                self._report.life = message.life
            elif isinstance(message, Drain):
                return message.timeout_s
        return 0.0

    async def until_stop(self, num_left: int) -> int:
        """Wait for the drain of all front ends; return the requests that they still had, `num_left` of our own if the
        supervisor is gone."""
        async for message in self._messages:
            if isinstance(message, Stop):
                return message.num_left
        return num_left

    async def _read(self) -> AsyncIterator[ControlMessage]:
        """Until the supervisor is gone."""
        loop = asyncio.get_running_loop()
        self._control.set_blocking(False)
        loop.add_reader(self._control.fileno(), self._news.set)
        try:
            while True:
                while self._said:
                    yield self._said.pop(0)
                await self._news.wait()
                self._news.clear()
                self._said = self._control.receive()
        except EOFError:
            return
        finally:
            loop.remove_reader(self._control.fileno())


def _report(control: ControlChannel, message: ControlMessage) -> None:
    """A supervisor that is gone, or reads nothing, is told nothing; the end of its socket says so elsewhere."""
    with contextlib.suppress(OSError, BufferError):
        control.send(message)


def _own_id() -> str:
    """Return a name for the replica, the same one in all of its front ends: the supervisor's process, on this host."""
    host = "".join(char for char in socket.gethostname() if char.isascii() and char.isprintable())
    return f"{host[:64]}-{os.getppid()}"


def _own_seed(seed: int, index: int) -> int:
    """Front ends that draw seeds for requests must not draw the same ones; 0 stays: from the system."""
    return seed + index if seed else 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed: 15 to 35 % less CPU per message."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main(sys.argv))
