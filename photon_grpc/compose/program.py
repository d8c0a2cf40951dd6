"""Front end and engine in one program: the engine computes in a thread of its own, the front end lives on an event loop in another, and
callers wait in theirs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.bridge.local import LocalClient
from photon_grpc.compose.console import LoadingDisplay
from photon_grpc.compose.served_model import read_served_model
from photon_grpc.compose.threads import limit_threads
from photon_grpc.config.flags import ServeConfig
from photon_grpc.errors import QueueFull
from photon_grpc.frontend.ask import Ask
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.model import ServedModel
from photon_grpc.frontend.update import Delta, Result

log = logging.getLogger(__name__)

T = TypeVar("T")

_POOL_THREADS = 2
#: How long one that met a full queue waits.
_RETRY_S = 0.1


class Program:
    """The threads and what they share. Raises StartupError when the model cannot be loaded."""

    def __init__(self, config: ServeConfig) -> None:
        limit_threads()
        # Only now: torch reads the number of threads when it is imported.
        from photon_grpc.compose.assemble import assemble

        model = read_served_model(config)
        display = LoadingDisplay()
        try:
            assembled = assemble(config, display.show)
        finally:
            display.close()
        self._facts = assembled.facts
        self._loop = asyncio.new_event_loop()
        self._client = LocalClient(self._loop, assembled.facts)
        self._host = self._client.host()
        self._engine = assembled.engine(self._host, self._host, NoHeartbeat())
        self._pool = ThreadPoolExecutor(_POOL_THREADS, "frontend")
        self._threads = [
            threading.Thread(target=self._compute, name="engine", daemon=True),
            threading.Thread(target=self._loop.run_forever, name="frontend", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._frontend: Frontend = self.wait(self._open(model, config.model.seed))

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it on the front end's loop; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The asynchronous iterator, seen from a thread that waits; leaving it early cancels it."""
        mailbox: queue.SimpleQueue[T | BaseException | None] = queue.SimpleQueue()

        async def fill() -> None:
            try:
                async for item in items:
                    mailbox.put(item)
                mailbox.put(None)
            except BaseException as error:
                mailbox.put(error)
                if not isinstance(error, Exception):
                    raise

        future = asyncio.run_coroutine_threadsafe(fill(), self._loop)
        try:
            while (item := mailbox.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    async def generate(self, asks: Sequence[Ask], advance: Callable[[], None]) -> list[Result]:
        """All of them; never more at a time than may wait. The first failure aborts the others."""
        room = asyncio.Semaphore(max(1, min(self._facts.max_queue_size, 2 * self._facts.max_num_seqs)))

        async def one(ask: Ask) -> Result:
            async with room:
                result = await self._persist(ask)
            advance()
            return result

        tasks = [asyncio.create_task(one(ask)) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream(self, ask: Ask) -> AsyncIterator[Delta]:
        """Everything new, output by output."""
        stream = await self._frontend.stream(ask)
        try:
            async for update in stream:
                for delta in update.deltas:
                    yield delta
        finally:
            stream.close()

    def close(self) -> None:
        """Ends both threads; what still runs fails."""
        engine, frontend = self._threads
        self._host.close()
        engine.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        frontend.join()
        self._pool.shutdown()
        self._loop.close()

    async def _open(self, model: ServedModel, seed: int) -> Frontend:
        frontend = Frontend(link=self._client, model=model, pool=self._pool, seed=seed)
        self._client.received(self._facts)
        return frontend

    async def _persist(self, ask: Ask) -> Result:
        """Comes again where the queue is full of long prompts: an empty one takes any."""
        while True:
            try:
                return await self._frontend.generate(ask)
            except QueueFull:
                await asyncio.sleep(_RETRY_S)

    def _compute(self) -> None:
        try:
            self._engine.run()
        except Exception:
            log.exception("the engine failed")
        finally:
            self._host.lost()
