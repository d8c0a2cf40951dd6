"""The watchers of the engine in one front end: they share its pictures."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self
from weakref import WeakSet

from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.frames import Watch
from photon_grpc.core.ports import EngineLink
from photon_grpc.errors import EngineFailure, QueueFull, Unavailable

#: Most watchers of one front end.
MAX_WATCHERS = 16


class Watcher:
    """An asynchronous iterator over the newest pictures; those that arrive between two reads replace each other.

    It waits while there is no engine, and ends when it is closed. Raise EngineFailure when there will be no engine.
    """

    def __init__(self, watchers: Watchers, newest: EnginePicture | None) -> None:
        self._watchers = watchers
        self._newest = newest
        self._failure = ""
        self._is_closed = False
        self._has_news = asyncio.Event()
        if newest is not None:
            self._has_news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EnginePicture:
        while True:
            await self._has_news.wait()
            if self._failure:
                raise EngineFailure(self._failure)
            if self._is_closed:
                raise StopAsyncIteration
            # The engine may be lost between a picture and this task's turn.
            self._has_news.clear()
            if self._newest is not None:
                return self._newest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def show(self, picture: EnginePicture) -> None:
        """Replace the picture that is read next."""
        self._newest = picture
        self._has_news.set()

    def forget(self) -> None:
        """Drop the picture that is read next."""
        self._newest = None
        self._has_news.clear()

    def fail(self, why: str) -> None:
        self._failure = why
        self._has_news.set()

    def close(self) -> None:
        """End the iteration and give the place up."""
        self._is_closed = True
        self._has_news.set()
        self._watchers.remove(self)


class Watchers:
    """Has the engine send pictures while at least one watcher is left, over restarts of the engine.

    A watcher that was forgotten without `close` is one no longer.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._watchers: WeakSet[Watcher] = WeakSet()
        #: What the engine was told.
        self._is_on = False
        self._newest: EnginePicture | None = None
        self._failure = ""

    def add(self) -> Watcher:
        """Return a new watcher. Raise QueueFull if there are enough, EngineFailure after `give_up`."""
        if self._failure:
            raise EngineFailure(self._failure)
        if (num_watchers := len(self._watchers)) >= MAX_WATCHERS:
            raise QueueFull(
                f"{num_watchers} viewers watch the engine already, and the limit is {MAX_WATCHERS}: close one of them",
                needed=num_watchers + 1,
                limit=MAX_WATCHERS,
            )
        watcher = Watcher(self, self._newest)
        self._watchers.add(watcher)
        self._send_watch()
        return watcher

    def remove(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        self._send_watch()

    def received(self, picture: EnginePicture) -> None:
        """Show a picture to all watchers."""
        self._newest = picture
        for watcher in self._watchers:
            watcher.show(picture)
        self._send_watch()

    def linked(self) -> None:
        """Tell a new engine if it is watched."""
        self._is_on = False
        self._send_watch()

    def lost(self) -> None:
        """Have the watchers wait for the next engine."""
        self._is_on, self._newest = False, None
        for watcher in self._watchers:
            watcher.forget()

    def give_up(self, why: str) -> None:
        """Fail all watchers, now and later: there will be no other engine."""
        self._failure = why
        for watcher in self._watchers:
            watcher.fail(why)

    def _send_watch(self) -> None:
        """Tell the engine whether it is watched, if that has changed."""
        is_on = bool(self._watchers)
        if is_on != self._is_on:
            # Without an engine it is told when there is one.
            with suppress(Unavailable):
                self._link.send(Watch(is_on))
                self._is_on = is_on
        if not is_on:
            self._newest = None
