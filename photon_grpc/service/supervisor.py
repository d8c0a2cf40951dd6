"""The supervisor: starts, connects, restarts and ends the engine and the front ends.

It loads neither torch nor grpc: this process stays small and outlives the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TextIO, cast

from photon_grpc.bridge.control import (
    Begin,
    Bound,
    ControlMessage,
    Counted,
    DrainWanted,
    Link,
    LoadingProgress,
    PageWanted,
    Ready,
    RequestsLost,
    Serving,
    Stop,
)
from photon_grpc.bridge.flight_recorder import FlightRecord
from photon_grpc.bridge.heartbeat import TICK_S
from photon_grpc.compose.console import LoadingDisplay, page_urls, ready_line
from photon_grpc.config.flags import ServeConfig, ServerConfig
from photon_grpc.config.service_files import read_service_files
from photon_grpc.core.frames import Facts
from photon_grpc.errors import StartupError
from photon_grpc.service.endpoints.listen import (
    ServiceListeners,
    UnixPath,
    admin_address,
    check_admin,
    check_distinct,
    plan_service,
)
from photon_grpc.service.endpoints.service_metrics import NoMetrics, ServiceMetrics, ServiceState, answer
from photon_grpc.service.logs.log_pipe import LogPipe, PipeStream, log_to_stderr, own_stderr
from photon_grpc.service.processes.address_space import check_limit
from photon_grpc.service.processes.child import Child, ChildCommand
from photon_grpc.service.processes.frontend_drain import FrontendDrain
from photon_grpc.service.processes.managed_process import ChildCrashed, ManagedProcess
from photon_grpc.service.processes.signals import END_SIGNALS, IDLE_SIGNALS

log = logging.getLogger("photon_grpc")

#: Time for a front end, after the drain timeout, to answer its last calls.
_FRONTEND_GRACE_S = 5.0
_ENGINE_GRACE_S = 5.0
#: Time for reading the last messages of an engine that has ended.
_LAST_MESSAGES_S = 1.0
#: Signals within this time count as one, which the terminal and the parent process both sent. Shorter than most presses
#: of a key.
_ONE_SIGNAL_S = 0.25


def serve(config: ServeConfig) -> int:
    """Run the service until SIGTERM, SIGHUP, SIGQUIT or Ctrl-C; call it from the main thread.

    Return the exit code: 0 after a drain, 2 if it cannot start (the reason is on stderr), 1 if a process crashed before
    it ever worked, 128 + signal after a second signal.
    """
    server = config.server
    pipe = LogPipe(own_stderr(), server.log_format)
    log_to_stderr(server.log_level, log_format=server.log_format, fd=pipe.fd)
    try:
        check_limit()
        return asyncio.run(Supervisor(config, stderr=pipe.fd).run())
    except StartupError as error:
        log.error("cannot start: %s", error)
        return 2
    finally:
        pipe.close()


class Supervisor:
    """One engine, its front ends, and the connections between them.

    `engine` and `frontend` are the modules that the processes run; `stderr` is their stderr (None: that of this
    process).
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        engine: str = "photon_grpc.service.processes.engine",
        frontend: str = "photon_grpc.service.processes.frontend",
        stderr: int | None = None,
    ) -> None:
        self._config = config
        # Once, so that front ends that are restarted serve the same.
        self._services = read_service_files(config.server.service, config.server.proto_path)
        self._stderr = stderr
        self._frontend_module = frontend
        self._listeners = ServiceListeners()
        #: Memory that each engine passes on to the next.
        self._flight = FlightRecord()
        self._engine = ManagedProcess(
            ChildCommand("engine", engine, stderr, (self._flight.fd,)),
            on_start=self._engine_started,
            on_message=self._on_engine_message,
            on_end=self._engine_ended,
        )
        self._frontends = [self._frontend_process(index) for index in range(config.server.frontends)]
        terminal = sys.stderr if stderr is None else PipeStream(stderr, config.server.log_format)
        self._display = LoadingDisplay(cast(TextIO, terminal))
        self._facts: Facts | None = None
        self._bound: dict[int, Bound] = {}
        self._serving: set[int] = set()
        self._is_logged_ready = False
        self._unix_paths: set[UnixPath] = set()
        self._admin = admin_address(config.server.admin_listen)
        #: Number of engines that have ended.
        self._life = 0
        self._metrics = _service_metrics(config.server, self._served)
        self._drain_timeout_s = config.server.drain_timeout
        self._signal_s = float("-inf")
        self._exit_code = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Run the service; return the exit code of `serve`. Raise StartupError."""
        check_distinct(self._config.server)
        self._listeners = plan_service(self._config.server)
        with self._signals_caught():
            try:
                check_admin(self._config.server.admin_listen)
                await self._metrics.start()
                await self._first_of(self._until_stopped(), self._watch())
                await self._first_of(self._drain(), self._hurry.wait(), self._watch())
            except ChildCrashed as error:
                log.error("%s", error)
                return 1
            finally:
                await self._clean_up()
        if self._hurry.is_set():
            log.info("stopped at once")
        return self._exit_code

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of living children by name: `engine`, `front end 0` ...."""
        return {process.name: process.child.pid for process in (self._engine, *self._frontends) if process.child}

    async def _until_stopped(self) -> None:
        log.info("loading %s", self._config.model.model or "the embedded demo model")
        processes = (process.keep() for process in (self._engine, *self._frontends))
        await self._first_of(self._stop.wait(), *processes)

    async def _watch(self) -> None:
        """End children that hang, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for process in (self._engine, *self._frontends):
                if process.child is not None:
                    process.child.end_if_hung()

    async def _first_of(self, *coroutines: Coroutine[Any, Any, object]) -> None:
        """Run all until one has ended, then cancel the others. Raise the exception of the first."""
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # The engine.

    def _engine_started(self) -> None:
        if engine := self._engine.child:
            engine.send(Begin(self._config))
            for index in range(len(self._frontends)):
                self._join(engine, index)

    def _on_engine_message(self, message: ControlMessage) -> None:
        if isinstance(message, LoadingProgress):
            self._display.show(message.stage, message.done, message.total)
        elif isinstance(message, Ready):
            self._display.close()
            self._engine.has_worked = True
            self._facts = message.facts
            self._log_if_ready()
        elif isinstance(message, RequestsLost):
            self._metrics.requests_lost(message.num_requests)

    def _engine_ended(self, engine: Child) -> None:
        if not engine.is_at_fault:
            self._flight.absolve()
        self._display.close()
        self._facts = None
        self._serving.clear()
        self._log_if_ready()
        self._life += 1
        self._metrics.engine_begins(self._life)

    # The front ends.

    def _frontend_process(self, index: int) -> ManagedProcess:
        return ManagedProcess(
            ChildCommand(f"front end {index}", self._frontend_module, self._stderr),
            on_start=lambda: self._frontend_started(index),
            on_message=lambda message: self._on_frontend_message(index, message),
            on_end=lambda child: self._frontend_ended(index),
        )

    def _frontend_started(self, index: int) -> None:
        if child := self._frontends[index].child:
            bound = self._bound.get(index)
            addresses = bound.addresses if bound else self._listeners.grpc.of(index)
            http = bound.http if bound else self._listeners.http.of(index)
            admin = self._admin if index == 0 else ""
            child.send(
                Begin(self._config, index, addresses, self._listeners.grpc.reuse_port, admin, http, self._services)
            )
            if self._engine.child is not None:
                self._join(self._engine.child, index)

    def _frontend_ended(self, index: int) -> None:
        self._serving_changed(index, False)
        self._metrics.frontend_ended(index)

    def _on_frontend_message(self, index: int, message: ControlMessage) -> None:
        if isinstance(message, Bound):
            self._frontends[index].has_worked = True
            self._bound[index] = message
            addresses = (*message.addresses, message.admin)
            self._unix_paths |= {path for address in addresses if (path := UnixPath.of(address))}
            if message.admin:
                log.info("admin service on %s", message.admin)
        elif isinstance(message, DrainWanted):
            self._request_drain(message)
        elif isinstance(message, Serving):
            self._serving_changed(index, message.is_serving)
            if not message.is_serving:
                self._join_again(index)
        elif isinstance(message, Counted):
            self._metrics.received(index, message)
        elif isinstance(message, PageWanted) and (child := self._frontends[index].child):
            child.send(answer(self._metrics, message))

    def _serving_changed(self, index: int, is_serving: bool) -> None:
        (self._serving.add if is_serving else self._serving.discard)(index)
        self._log_if_ready()

    def _log_if_ready(self) -> None:
        """Log the ready line once all front ends serve and the engine is ready, in whichever order they report it."""
        is_ready = len(self._serving) == len(self._frontends) and 0 in self._bound
        if is_ready and self._facts is not None and not self._is_logged_ready:
            pages = page_urls(self._bound[0].http, has_tls=bool(self._config.server.tls_cert))
            log.info("%s", ready_line(self._bound[0].addresses, self._bound[0].model, self._facts, pages))
        self._is_logged_ready = is_ready and self._facts is not None

    def _join_again(self, index: int) -> None:
        """Reconnect a front end that the engine dropped for reading nothing; harmless if the engine has died."""
        if self._engine.child is not None and self._facts is not None and not self._stop.is_set():
            self._join(self._engine.child, index)

    def _join(self, engine: Child, index: int) -> None:
        """Connect the engine and one front end by a new socket, whether either is new or not."""
        frontend = self._frontends[index].child
        if frontend is None:
            return
        upper, lower = socket.socketpair()
        with upper, lower:
            engine.send(Link(self._life), lower)
            frontend.send(Link(self._life), upper)

    def _served(self) -> ServiceState:
        return ServiceState(
            is_ready=bool(self._serving) and not self._stop.is_set(),
            facts=self._facts,
            model=self._bound[0].model if 0 in self._bound else "",
            num_frontends=sum(process.child is not None for process in self._frontends),
            num_engine_restarts=max(self._engine.num_starts - 1, 0),
            num_frontend_restarts=sum(max(process.num_starts - 1, 0) for process in self._frontends),
        )

    # The end.

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # nohup ignores SIGHUP, so that the service outlives its terminal.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        caught = [signum for signum in END_SIGNALS if signum not in ignored]
        for signum in caught:
            loop.add_signal_handler(signum, self._signalled, signum)
        # Signals with another handler keep it.
        idle = [signum for signum in IDLE_SIGNALS if signal.getsignal(signum) is signal.SIG_DFL]
        for signum in idle:
            loop.add_signal_handler(signum, log.info, "%s is ignored; SIGTERM drains", signum.name)
        try:
            yield
        finally:
            for signum in (*caught, *idle):
                loop.remove_signal_handler(signum)

    def _request_drain(self, request: DrainWanted) -> None:
        if not self._stop.is_set():
            if request.timeout_s is not None:
                self._drain_timeout_s = request.timeout_s
            self._stop.set()

    def _signalled(self, signum: signal.Signals) -> None:
        # The first signal never ends the drain, even after an operator's Drain: Kubernetes sends both.
        if self._signal_s == float("-inf"):
            self._signal_s = time.monotonic()
            self._stop.set()
        elif time.monotonic() - self._signal_s > _ONE_SIGNAL_S:
            self._exit_code = 128 + signum
            self._hurry.set()

    async def _drain(self) -> None:
        """End the front ends, which first answer running requests, then the engine."""
        timeout_s = self._drain_timeout_s
        if self._facts is None:
            log.info("stopping: no engine is ready, so no request is running")
        else:
            log.info("draining: running requests have %g s to finish (press Ctrl-C again to stop at once)", timeout_s)
        drains = [
            FrontendDrain(
                process.child,
                timeout_s,
                on_message=partial(self._on_frontend_message, index),
                on_end=partial(self._metrics.frontend_ended, index),
            )
            for index, process in enumerate(self._frontends)
            if process.child
        ]
        async with asyncio.TaskGroup() as listening:
            losses = listening.create_task(self._receive_losses())
            for drain in drains:
                listening.create_task(drain.listen())
            # None ends before all have drained: an operator who waits at one gets the result of the whole service.
            num_left = sum(await asyncio.gather(*(drain.num_left(timeout_s + _FRONTEND_GRACE_S) for drain in drains)))
            for drain in drains:
                drain.child.send(Stop(num_left))
            await asyncio.gather(*(drain.child.end_within(_FRONTEND_GRACE_S) for drain in drains))
            if engine := self._engine.child:
                engine.send(Stop())
                await engine.end_within(_ENGINE_GRACE_S if self._facts else 0.0)
            # Its last messages may still be unread.
            await asyncio.wait({losses}, timeout=_LAST_MESSAGES_S)
            losses.cancel()
        log.info("stopped")

    async def _receive_losses(self) -> None:
        """Count the requests of front ends that die while they drain, as the engine reports them."""
        if engine := self._engine.child:
            async for message in engine.messages():
                if isinstance(message, RequestsLost):
                    self._metrics.requests_lost(message.num_requests)

    async def _clean_up(self) -> None:
        """End all processes, remove the Unix sockets and release the reserved ports."""
        self._display.close()
        self._metrics.close()
        for process in (self._engine, *self._frontends):
            if process.child is not None:
                process.child.kill()
                await process.child.ended()
                process.child.close()
        for path in self._unix_paths:
            path.remove()
        self._listeners.close()
        self._flight.close()


def _service_metrics(config: ServerConfig, served: Callable[[], ServiceState]) -> ServiceMetrics:
    if not config.has_metrics:
        return NoMetrics()
    # Imported only if needed.
    from photon_grpc.service.endpoints.metrics import MetricsEndpoint

    return MetricsEndpoint([config.metrics_listen] if config.metrics_listen else [], served)
