"""Many prompts, some at a time, repeated until a full server answers; and one prompt sent twice."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from itertools import islice
from typing import Any, TypeVar

from photon_grpc.client.retry_policy import Attempts, RetryPolicy
from photon_grpc.errors import PhotonError

P = TypeVar("P")
T = TypeVar("T")

#: Answers one prompt.
Answer = Callable[[P], Coroutine[Any, Any, T]]

#: The policy for one prompt of many: repeat until a full server has room.
PERSISTENT = RetryPolicy(max_retries=math.inf, waits_for_room=True)

#: The default of `map`.
CONCURRENCY = 64


def check(prompts: object, concurrency: int) -> None:
    """Check the arguments of `map`. Raise TypeError, ValueError."""
    if isinstance(prompts, str | bytes):
        raise TypeError("prompts is an iterable of prompts, not one; did you mean [prompt]?")
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; at least 1 request runs at a time")


async def ordered(answer: Answer[P, T], prompts: Iterable[P], concurrency: int) -> AsyncGenerator[T, None]:
    """Yield the answers in the order of the prompts, `concurrency` at a time, with at most as many waiting in turn."""
    places = asyncio.Semaphore(concurrency)

    async def in_a_place(prompt: P) -> T:
        async with places:
            return await answer(prompt)

    window: deque[asyncio.Task[T]] = deque()
    try:
        for prompt in prompts:
            window.append(asyncio.create_task(in_a_place(prompt)))
            while window and (window[0].done() or len(window) >= 2 * concurrency):
                yield await window[0]
                window.popleft()
        while window:
            yield await window[0]
            window.popleft()
    finally:
        await _end(window)


async def unordered(
    answer: Answer[P, T], prompts: Iterable[P], concurrency: int
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the prompt, answer) as they end, `concurrency` at a time."""
    waiting = enumerate(prompts)
    running: dict[asyncio.Task[T], int] = {}
    done: deque[asyncio.Task[T]] = deque()
    try:
        while True:
            for index, prompt in islice(waiting, concurrency - len(running)):
                running[asyncio.create_task(answer(prompt))] = index
            if not running:
                return
            if not done:
                done.extend((await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0])
            task = done.popleft()
            yield running.pop(task), task.result()
    finally:
        await _end(running)


async def persist(send: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Repeat while the server is full, and for a while if it or a proxy fails temporarily. Raise other failures."""
    attempts = Attempts(PERSISTENT)
    while True:
        try:
            return await send()
        except PhotonError as error:
            pause_s = attempts.pause_s(error)
        await asyncio.sleep(pause_s)


async def hedged(send: Callable[[bool], Coroutine[Any, Any, T]], after_s: float) -> T:
    """Return the first answer of `send(False)` or, sent after `after_s` without one, `send(True)`."""
    first = asyncio.create_task(send(False))
    waiting = {first}
    try:
        if not (await asyncio.wait(waiting, timeout=after_s))[0]:
            waiting.add(asyncio.create_task(send(True)))
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None or not waiting:
                    return task.result()
    finally:
        await _end(waiting)


async def _end(tasks: Iterable[asyncio.Task[T]]) -> None:
    remaining = list(tasks)
    for task in remaining:
        task.cancel()
    await asyncio.gather(*remaining, return_exceptions=True)
