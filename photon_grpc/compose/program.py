"""Front end and engine in one program: the engine computes in a thread of its own, the front end lives on an event loop
in another, and callers wait in theirs.

`end` only asks: every call in flight is cancelled, and each of the two threads cleans up after itself. So a program may
be closed twice, by several threads, in a signal handler, after an interrupted `close`, or by the garbage collector in a
thread of its own.
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

_POOL_THREADS = 2
#: Wait of a request that met a full queue.
_RETRY_S = 0.1

#: `is_ours` is set in the threads of every program: one that waits for another's end may be waited for itself.
_thread = threading.local()


class Program:
    """The threads and what they share. Raises StartupError when the model cannot be loaded."""

    def __init__(self, config: ServeConfig) -> None:
        limit_threads()
        # Only now: torch reads the number of threads when it is imported.
        from photon_grpc.compose.assemble import assemble

        # There are no messages here that scores must fit in.
        model = replace(read_served_model(config), max_message_bytes=sys.maxsize)
        display = LoadingDisplay(sys.stderr)
        try:
            assembled = assemble(config, display.show)
        finally:
            display.close()
        #: Threads do not follow into a fork.
        self._pid = os.getpid()
        self._facts = assembled.facts
        self._lock = threading.RLock()
        self._is_closed = False
        self._calls: set[Future[Any]] = set()
        # With a factory the loop is not made that of the thread which makes it.
        self._events = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._events.get_loop()
        self._is_wanted_no_more = asyncio.Event()
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
        """Run it on the front end's loop; Ctrl-C cancels it. Raise Closed when the program is closed, before or
        meanwhile."""
        future = self._submit(coroutine)
        try:
            return _result(future)
        finally:
            future.cancel()

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Yield the asynchronous iterator, seen from a thread that waits; leaving it early cancels it. Raise Closed as
        `wait`, at once."""
        mailbox: queue.SimpleQueue[T | Future[None]] = queue.SimpleQueue()

        async def fill() -> None:
            async for item in items:
                mailbox.put(item)

        future = self._submit(fill())
        # Not put by `fill`: what is cancelled before its first step runs no line of it.
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
        """Return the model as callers see it."""
        return self._frontend.model("")

    async def generate(self, asks: Sequence[Ask], advance: Callable[[], None]) -> list[Result]:
        """All of them; never more at a time than may wait. The first failure aborts the others."""
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
        """Everything new, output by output."""
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
        """Every call in flight raises Closed, and the threads are asked to end. Waits for nothing; from any thread, any
        number of times."""
        with self._lock:
            self._is_closed = True
        for future in tuple(self._calls):
            future.cancel()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the front end has ended
            self._loop.call_soon_threadsafe(self._is_wanted_no_more.set)
        self._host.close()

    def close(self) -> None:
        """`end`, then waits until the threads are gone and what they held is given back; one of them does not wait for
        itself. In a fork nothing is there to end."""
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
        # The lock: what is submitted is seen by `end`, or refused.
        with self._lock:
            try:
                if self._is_closed:
                    raise _closed()
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except (Closed, RuntimeError):  # a signal handler may have closed the loop since the look at `_is_closed`
                coroutine.close()
                raise _closed() from None
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    async def _begin(self, ask: Ask) -> tuple[TokenStream, Update]:
        """Return the stream with the first of its Updates: in its place comes the error of an engine whose queue is
        full."""
        stream = await self._frontend.stream(ask)
        try:
            return stream, await anext(stream)
        except BaseException as error:
            stream.close(error)
            raise

    async def _persist(self, call: Callable[[Ask], Awaitable[T]], ask: Ask) -> T:
        """Come again where the queue is full: an empty one takes any request."""
        while True:
            try:
                return await call(ask)
            except QueueFull:
                await asyncio.sleep(_RETRY_S)

    # -- threads -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            for name, work in (("frontend", self._converse), ("engine", self._compute)):
                thread = _Thread(name, work)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self._loop.call_soon_threadsafe(self._is_engine_gone.set)
            self.close()
            raise

    def _converse(self) -> None:
        with self._events:
            self._events.run(self._live())
        self._pool.shutdown(cancel_futures=True)

    async def _live(self) -> None:
        """Run until the program is closed and its engine has sent its last frame; the Runner cancels what is left on
        the loop."""
        await self._is_wanted_no_more.wait()
        await self._is_engine_gone.wait()

    def _compute(self) -> None:
        try:
            self._engine.run()
        except Exception:
            log.exception("the engine failed")
        finally:
            self._loop.call_soon_threadsafe(self._engine_gone)
            self._release()

    def _engine_gone(self) -> None:
        self._frontend.give_up("the engine of this program has failed; its log says why")
        self._client.lost()
        self._is_engine_gone.set()

    def _release(self) -> None:
        """Give back what the engine held: weights, pages, graphs."""
        from photon_grpc.runner.model_runner import free_unused

        try:
            self._runner.close()
        except Exception:
            log.exception("the device did not finish what was launched")
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
        """Until it has ended. Ctrl-C in a `join` would have the thread counted as ended (Python 3.11)."""
        self._is_done.wait()
        self.join()


class _Pool(ThreadPoolExecutor):
    """Its threads end before anything else at the end of the interpreter: a call that comes then raises Closed."""

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
