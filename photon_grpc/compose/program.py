"""Front end and engine in one program: the engine in one thread, the front end on an event loop in another.

Callers wait in their own threads. `end` only requests the end: it cancels every running call, and each of the two
threads cleans up after itself. So a program may be closed twice, by several threads, in a signal handler, after an
interrupted `close`, or by the garbage collector in one of these threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.bridge.local import LocalClient
from photon_grpc.compose.console import LoadingDisplay
from photon_grpc.compose.served_model import read_served_model
from photon_grpc.compose.threads import limit_threads
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.ask import Ask
from photon_grpc.core.ports import EnginePorts
from photon_grpc.errors import Closed, QueueFull
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.frontend.output.update import OutputDelta, Result, Update
from photon_grpc.frontend.stream import TokenStream

log = logging.getLogger(__name__)

T = TypeVar("T")

#: There are no messages, whose size would limit log-probabilities. GetModel can state no larger number, if a server is
#: built on this front end.
_MAX_MESSAGE_BYTES = 2**32 - 1
_POOL_THREADS = 2
#: Pause before a request that met a full queue is sent again.
_RETRY_S = 0.1

#: `is_ours` is set in the threads of all programs, which must not wait for each other's end.
_thread = threading.local()


class Program:
    """The threads and their shared state. Raises StartupError if the model cannot be loaded."""

    def __init__(self, config: ServeConfig) -> None:
        limit_threads(config.parallel.num_ranks)
        # Only now: torch reads the number of threads when it is imported.
        from photon_grpc.compose.assemble import assemble
        from photon_grpc.compose.leading_rank import ranks_of

        model = replace(read_served_model(config), max_message_bytes=_MAX_MESSAGE_BYTES)
        display = LoadingDisplay(sys.stderr)
        try:
            assembled = assemble(config, display.show, ranks_of(config))
        finally:
            display.close()
        #: A fork does not have the threads.
        self._pid = os.getpid()
        self._facts = assembled.facts
        self._lock = threading.RLock()
        self._is_closed = False
        self._calls: set[Future[Any]] = set()
        # With a factory the loop does not become the current one of this thread.
        self._events = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._events.get_loop()
        self._is_ending = asyncio.Event()
        self._is_engine_gone = asyncio.Event()
        self._client = LocalClient(self._loop, assembled.facts)
        self._host = self._client.host()
        self._runner = assembled.runner
        self._engine = assembled.engine(EnginePorts(self._host, self._host, NoHeartbeat()))
        self._pool = _Pool(_POOL_THREADS, "frontend", initializer=_mark_thread)
        encoder = ThreadEncoder(model, self._pool)
        self._frontend = Frontend(link=self._client, model=model, encoder=encoder, seed=config.model.seed)
        self._threads: list[_Thread] = []
        self._start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the front end's loop; Ctrl-C cancels it. Raise Closed if the program is closed."""
        future = self._submit(coroutine)
        try:
            return _result(future)
        finally:
            future.cancel()

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Yield the items of an asynchronous iterator; leaving the loop early cancels it.

        Raise Closed as soon as the program is closed.
        """
        mailbox: queue.SimpleQueue[T | Future[None]] = queue.SimpleQueue()

        async def fill() -> None:
            async for item in items:
                mailbox.put(item)

        future = self._submit(fill())
        # Not put by `fill`, which runs no line if it is cancelled before its first step.
        future.add_done_callback(mailbox.put)
        try:
            while not isinstance(item := mailbox.get(), Future):
                if self._is_closed:
                    raise _closed()
                yield item
            _result(item)
        finally:
            future.cancel()

    def model_facts(self) -> ModelFacts:
        """Return the facts about the model that callers see."""
        return self._frontend.model("")

    async def generate(self, asks: Sequence[Ask], advance: Callable[[], None]) -> list[Result]:
        """Generate for all asks, at most as many at a time as may wait. The first failure aborts the others."""
        room = asyncio.Semaphore(max(1, min(self._facts.max_queue_size, 2 * self._facts.max_num_seqs)))

        async def one(ask: Ask) -> Result:
            async with room:
                result = await self._persist(self._frontend.generate, ask)
            advance()
            return result

        tasks = [asyncio.create_task(one(ask)) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream(self, ask: Ask) -> AsyncIterator[OutputDelta]:
        """Yield the deltas of all outputs."""
        stream, first = await self._persist(self._begin, ask)
        try:
            update: Update | None = first
            while update is not None:
                for delta in update.deltas:
                    yield delta
                update = await anext(stream, None)
        finally:
            stream.close()

    def end(self) -> None:
        """Make every running call raise Closed and ask the threads to end, without waiting.

        It may be called from any thread, any number of times.
        """
        with self._lock:
            self._is_closed = True
        for future in tuple(self._calls):
            future.cancel()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the front end has ended
            self._loop.call_soon_threadsafe(self._is_ending.set)
        self._host.close()

    def close(self) -> None:
        """Call `end`, then wait until the threads have ended and released their memory.

        A program's own threads do not wait. A fork has nothing to end.
        """
        if os.getpid() != self._pid:
            return
        self.end()
        if not getattr(_thread, "is_ours", False):
            for thread in self._threads:
                thread.wait()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if os.getpid() != self._pid:
            coroutine.close()
            raise Closed("this LLM belongs to the process that opened it; open another one here")
        # Under the lock a call is either refused or cancelled by `end`.
        with self._lock:
            try:
                if self._is_closed:
                    raise _closed()
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except (Closed, RuntimeError):  # a signal handler may have closed the loop since the check of `_is_closed`
                coroutine.close()
                raise _closed() from None
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    async def _begin(self, ask: Ask) -> tuple[TokenStream, Update]:
        """Return the stream and its first Update. Raise QueueFull, which comes in place of the first Update."""
        stream = await self._frontend.stream(ask)
        try:
            return stream, await anext(stream)
        except BaseException as error:
            stream.close(error)
            raise

    async def _persist(self, call: Callable[[Ask], Awaitable[T]], ask: Ask) -> T:
        """Retry on QueueFull; this terminates, since an empty queue accepts any request."""
        while True:
            try:
                return await call(ask)
            except QueueFull:
                await asyncio.sleep(_RETRY_S)

    # -- threads -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            for name, work in (("frontend", self._run_frontend), ("engine", self._run_engine)):
                thread = _Thread(name, work)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self._loop.call_soon_threadsafe(self._is_engine_gone.set)
            self.close()
            raise

    def _run_frontend(self) -> None:
        with self._events:
            self._events.run(self._until_ended())
        self._pool.shutdown(cancel_futures=True)

    async def _until_ended(self) -> None:
        """Wait until the program is closed and its engine has sent its last frame; the Runner cancels other tasks."""
        await self._is_ending.wait()
        await self._is_engine_gone.wait()

    def _run_engine(self) -> None:
        try:
            self._engine.run()
        except Exception:
            log.exception("the engine failed")
        finally:
            self._loop.call_soon_threadsafe(self._engine_gone)
            self._release()

    def _engine_gone(self) -> None:
        self._frontend.give_up("the engine of this program has failed; the log has the reason")
        self._client.lost()
        self._is_engine_gone.set()

    def _release(self) -> None:
        """Release the engine's memory: weights, pages, graphs."""
        from photon_grpc.runner.model_runner import free_unused

        try:
            self._runner.close()
        except Exception:
            log.exception("the device did not finish the launched steps")
        del self._engine, self._runner
        free_unused()


class _Thread(threading.Thread):
    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._is_done = threading.Event()

    def run(self) -> None:
        _mark_thread()
        try:
            self._work()
        finally:
            self._is_done.set()

    def wait(self) -> None:
        """Wait for the end; a `join` interrupted by Ctrl-C would mark the thread as ended (Python 3.11)."""
        self._is_done.wait()
        self.join()


class _Pool(ThreadPoolExecutor):
    """A pool that raises Closed for work after the end of its threads, which end first when the interpreter exits."""

    def submit(self, *work: Any, **options: Any) -> Future[Any]:
        try:
            return super().submit(*work, **options)
        except RuntimeError:
            raise _closed() from None


def _mark_thread() -> None:
    _thread.is_ours = True


def _result(future: Future[T]) -> T:
    try:
        return future.result()
    except CancelledError:  # only `end` cancels an awaited task
        raise _closed() from None


def _closed() -> Closed:
    return Closed("this LLM is closed")
