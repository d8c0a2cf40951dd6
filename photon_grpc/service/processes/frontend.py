"""A front-end process, started by the supervisor: gRPC to the outside, the bridge to the engine, and no torch."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from photon_grpc.bridge.client import BridgeClient
from photon_grpc.bridge.codec import MAX_STEP_BYTES
from photon_grpc.bridge.control import Begin, Bound, ControlChannel, ControlMessage, Drained, DrainWanted, Serving
from photon_grpc.bridge.heartbeat import SharedHeartbeat
from photon_grpc.compose.access import access
from photon_grpc.compose.http_api import HttpApi, ServedParts, http_api
from photon_grpc.compose.observation import observation
from photon_grpc.compose.other_services import other_services
from photon_grpc.compose.served_model import read_served_model
from photon_grpc.compose.tracing import tracing
from photon_grpc.errors import ConfigError, StartupError
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.readiness import State
from photon_grpc.frontend.record import Observers
from photon_grpc.observe import request_log
from photon_grpc.server.admin_listener import AdminListener
from photon_grpc.server.server import Server
from photon_grpc.service.logs.log_pipe import log_bare_lines, log_to_stderr
from photon_grpc.service.processes import address_space
from photon_grpc.service.processes.child import ChildContext, enter_child
from photon_grpc.service.processes.counts_report import counts_report
from photon_grpc.service.processes.encoder_client import EncoderProcess
from photon_grpc.service.processes.supervisor_commands import SupervisorCommands
from photon_grpc.service.processes.supervisor_pages import SupervisorPages

log = logging.getLogger(__name__)

#: Threads for tokenizing and templates; more than the number of cores gain nothing.
_MAX_POOL_THREADS = 4
#: Time after the drain for the last answers over HTTP.
_HTTP_CLOSING_S = 1.0
#: Interval of the event loop's heartbeats, and the longest silence that is no hang.
_BEAT_INTERVAL_S = 0.5
_LONGEST_TURN_S = 5.0
#: mallopt(3).
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 256 * 1024


def main(argv: list[str]) -> int:
    """Serve; return 0 after a drain or if the supervisor is gone, CANNOT_START after a StartupError."""
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
        return context.refuse(address_space.advice(name))
    return 0


@dataclass(frozen=True, slots=True)
class _Servers:
    """The servers of a front end, and where they listen."""

    grpc: Server
    http: HttpApi
    admin: AdminListener
    bound: Bound

    async def drain(self, timeout_s: float) -> int:
        """End all but AdminService: running requests have `timeout_s`. Return the number of those cut off."""
        self.http.draining()
        num_left = await self.grpc.drain_and_stop(timeout_s)
        await self.http.stop(_HTTP_CLOSING_S)
        return num_left


async def _serve(context: ChildContext) -> None:
    control = context.control
    link, pages = BridgeClient(max_frame_bytes=MAX_STEP_BYTES), SupervisorPages(control)
    async with contextlib.AsyncExitStack() as stack:
        parts = await _parts(context.begin, link, pages, stack)
        parts.frontend.on_state(lambda state: _report(control, Serving(state is State.SERVING)))
        servers = await _listen(context, parts, stack)
        _keep_beating(context.heartbeat)
        _report(control, servers.bound)
        gc.freeze()
        report = counts_report(control, parts.frontend, parts.observed.counts)
        reporting = asyncio.create_task(report.keep())
        commands = SupervisorCommands(context, link, report, pages)
        num_left = await servers.drain(await commands.until_drain())
        _report(control, Drained(num_left))
        await servers.admin.stop(await commands.until_stop(num_left))
        reporting.cancel()
        report.send()
        link.close()


async def _parts(
    begin: Begin, link: BridgeClient, pages: SupervisorPages, stack: contextlib.AsyncExitStack
) -> ServedParts:
    """Return what answers calls; `stack` ends it. Raise ConfigError."""
    config, model = begin.config, read_served_model(begin.config)
    num_threads = min(os.cpu_count() or 1, _MAX_POOL_THREADS)
    pool = stack.enter_context(ThreadPoolExecutor(num_threads, "frontend"))
    threads = ThreadEncoder(model, pool, max_at_once=2 * num_threads)
    encoder = await stack.enter_async_context(EncoderProcess(threads, begin).running())
    services = other_services(begin.services, config, model)
    for warning in services.services.warnings if begin.index == 0 else ():
        log.warning("--service: %s", warning)
    allowed = await stack.enter_async_context(access(config.server, services.services.names))
    observed = observation(config.server)
    replica_id = config.server.replica_id or _own_id()
    traced = stack.enter_context(tracing(config.server, replica_id))
    frontend = Frontend(
        link=link,
        model=model,
        encoder=encoder,
        seed=_own_seed(config.model.seed, begin.index),
        quotas=allowed.quotas,
        observers=Observers((*observed.observers, *traced)),
    )
    return ServedParts(frontend, config.server, allowed, observed, replica_id, pages, services)


async def _listen(context: ChildContext, parts: ServedParts, stack: contextlib.AsyncExitStack) -> _Servers:
    """Start the servers; `stack` stops those of callers. Raise ConfigError."""
    begin, frontend, certificates = context.begin, parts.frontend, parts.allowed.certificates
    rules = parts.observed.rules(parts.replica_id, parts.allowed.keys)
    server = Server(frontend, config=parts.config, rules=rules, certificates=certificates, services=parts.services)
    addresses = await server.start(begin.addresses, reuse_port=begin.reuse_port)
    # gRPC prints a traceback if a listening server is dropped; draining it a second time does nothing.
    stack.push_async_callback(server.drain_and_stop, 0.0)
    http = http_api(begin.http, parts)
    http_addresses = await http.start(begin.http, reuse_port=begin.reuse_port)
    stack.push_async_callback(http.stop, 0.0)

    def drain(timeout_s: float | None) -> None:
        _report(context.control, DrainWanted(timeout_s))

    admin = AdminListener(frontend, drain=drain, rules=rules, certificates=certificates)
    admin_address = await _listen_for_operators(admin, begin)
    return _Servers(server, http, admin, Bound(addresses, frontend.model("").name, admin_address, http_addresses))


async def _listen_for_operators(admin: AdminListener, begin: Begin) -> str:
    """Serve AdminService; return its address, "" if it is off or its default socket fails. Raise ConfigError."""
    if not begin.admin:
        return ""
    try:
        return await admin.start(begin.admin)
    except ConfigError as error:
        if begin.config.server.admin_listen:
            raise
        # The user did not request this socket, so the service works without it.
        log.warning("no admin service: %s", error)
        return ""


def _map_large_blocks() -> None:
    """Have glibc return large freed blocks to the system; it would keep gigabytes after messages of 32 MiB."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def _keep_beating(heartbeat: SharedHeartbeat) -> None:
    """Beat now and every 0.5 s, from the event loop itself, so that the beats show that it runs."""
    heartbeat.beat(_LONGEST_TURN_S)
    asyncio.get_running_loop().call_later(_BEAT_INTERVAL_S, _keep_beating, heartbeat)


def _report(control: ControlChannel, message: ControlMessage) -> None:
    """Send a message; ignore a supervisor that is gone or reads nothing, whose end is noticed elsewhere."""
    with contextlib.suppress(OSError, BufferError):
        control.send(message)


def _own_id() -> str:
    """Return the replica's name, the same in all of its front ends: this host and the supervisor's process id."""
    host = "".join(char for char in socket.gethostname() if char.isascii() and char.isprintable())
    return f"{host[:64]}-{os.getppid()}"


def _own_seed(seed: int, index: int) -> int:
    """Return a different seed for each front end, so that requests differ; 0 stays, for a seed from the system."""
    return seed + index if seed else 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's factory if it is installed: it takes 15 to 35 % less CPU per message."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main(sys.argv))
