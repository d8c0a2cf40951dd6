"""Many prompts, some at a time: all of them answered, however full the server is; and one prompt, sent twice."""

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

#: Of one prompt among many: a full server is asked until it has room.
PERSISTENT = RetryPolicy(max_retries=math.inf, waits_for_room=True)

#: Of `map`, unless it says otherwise.
CONCURRENCY = 64


def check(prompts: object, concurrency: int) -> None:
    """Raise TypeError, ValueError for arguments of `map` that are mistakes of the program."""
    if isinstance(prompts, str | bytes):
        raise TypeError("prompts is an iterable of prompts, not one; did you mean [prompt]?")
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; at least 1 request runs at a time")


async def ordered(answer: Answer[P, T], prompts: Iterable[P], concurrency: int) -> AsyncGenerator[T, None]:
    """Return the answers in the order of the prompts, `concurrency` asked for at a time, at most as many more held
    back."""
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
    """Index of the prompt and answer, as they come, `concurrency` at a time."""
    waiting = enumerate(prompts)
    asked: dict[asyncio.Task[T], int] = {}
    done: deque[asyncio.Task[T]] = deque()
    try:
        while True:
            for index, prompt in islice(waiting, concurrency - len(asked)):
                asked[asyncio.create_task(answer(prompt))] = index
            if not asked:
                return
            if not done:
                done.extend((await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED))[0])
            task = done.popleft()
            yield asked.pop(task), task.result()
    finally:
        await _end(asked)


async def persist(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Ask again while the server says that it is full, and for a while where none is there or something on the way is
    full. Raise what else fails."""
    attempts = Attempts(PERSISTENT)
    while True:
        try:
            return await ask()
        except PhotonError as error:
            pause_s = attempts.pause_s(error)
        await asyncio.sleep(pause_s)


async def hedged(send: Callable[[bool], Coroutine[Any, Any, T]], after_s: float) -> T:
    """Return the first answer of two: `send(False)` at once and, where it has no answer `after_s` later, `send(True)`;
    the other one is cancelled. Raise the last failure where both fail."""
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
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
