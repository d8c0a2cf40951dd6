"""An event loop in its own thread, for callers without a loop, with many threads, or inside another loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from photon_grpc.errors import Closed

T = TypeVar("T")


class LoopThread:
    """The thread. It runs coroutines for any number of other threads, which wait."""

    def __init__(self) -> None:
        #: A fork copies the loop but not the thread that runs it.
        self._process_id = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="photon-grpc-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result; an interrupt cancels it. Raise Closed after `close`, RuntimeError after a fork."""
        future = self._submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise Closed("this client was closed during the call, or the call was cancelled") from None
        finally:
            future.cancel()

    def call_soon(self, function: Callable[[], Any]) -> None:
        """Call `function` on the loop; do nothing after `close` or in another process."""
        if os.getpid() != self._process_id:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items; leaving early closes their generator."""
        end: list[T] = []
        try:
            while (item := self.run(_next_of(items, end))) is not end:
                yield item  # type: ignore[misc]
        finally:
            with contextlib.suppress(Closed):
                self.run(_close(items))

    def close(self) -> None:
        """End the thread and cancel what it runs."""
        self.call_soon(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a blocking call in the client's own thread would wait for itself")
        if os.getpid() != self._process_id:
            coroutine.close()
            raise RuntimeError("this client was made before the process forked; make one in each process")
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise Closed("this client is closed") from None

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            # Closing the Runner cancels the remaining tasks.
            runner.get_loop().run_forever()


async def _next_of(items: AsyncGenerator[T, None], end: list[T]) -> T | list[T]:
    async for item in items:
        return item
    return end


async def _close(items: AsyncGenerator[T, None]) -> None:
    await items.aclose()
