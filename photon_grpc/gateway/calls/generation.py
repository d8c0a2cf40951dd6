"""The requests of one HTTP call, which may be several, as asks of the front end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from photon_grpc.core.admission import check_labels
from photon_grpc.core.ask import Ask, ChatInput, ConstraintAsk, IdsInput, Origin, TextInput
from photon_grpc.core.generation import Start
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.frontend.output.update import Result, Update
from photon_grpc.gateway.calls.body import json_object
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.fields import Table, Values, read, structs

T = TypeVar("T")

#: Requests of one call that run at a time.
_AT_ONCE = 32
_USER = "user"
#: Characters of a cache salt.
_MAX_SALT = 256

#: Called with the number of the request, its Start and each Update.
OnUpdate = Callable[[int, Start, Update], Awaitable[None]]
Input = TextInput | IdsInput | ChatInput


@contextlib.contextmanager
def recording_refusals(frontend: Frontend, origin: Origin) -> Iterator[None]:
    """Record a request that is refused before the front end gets it."""
    try:
        yield
    except BaseException as error:
        frontend.refused(origin, error)
        raise


async def read_request(
    call: HttpCall,
    frontend: Frontend,
    table: Table,
    max_body_bytes: int,
    wanted: Callable[[Values, ModelFacts, Origin], T],
) -> T:
    """Return what `wanted` makes of the body's fields. Raise PhotonError.

    A refusal is recorded as the end of a request.
    """
    call.is_request = True
    with recording_refusals(frontend, call.origin()):
        values = read(table, await json_object(call, max_body_bytes))
        call.note_ignored(values.ignored)
        facts = frontend.model(values.get("model", ""))
        origin = call.origin()
        origin.model = facts.name
        return wanted(values, facts, origin)


def cache_of(user: str, salt: str = "") -> dict[str, str]:
    """Return the options of the cache: users do not share prefixes."""
    if user:
        # The length keeps apart ("a", "bc") and ("ab", "c").
        salt = f"{len(user)}:{user}{salt}"
    if len(salt) > _MAX_SALT:
        salt = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()
    return {"salt": salt} if salt else {}


def label(origin: Origin, user: str) -> None:
    """Label the request with its end user. Raise InvalidRequest."""
    check_labels({_USER: user})
    origin.labels = ((_USER, user),)


def ask_of(
    call: HttpCall,
    origin: Origin,
    input: Input,
    options: Mapping[str, Mapping[str, Any]],
    *,
    model: str,
    constraint: ConstraintAsk | None = None,
) -> Ask:
    """Return one request. `options` are by group."""
    groups = {group: dict(values) for group, values in options.items()}
    if call.max_queue_s is not None:
        groups.setdefault("scheduling", {}).setdefault("max_queue_duration_s", call.max_queue_s)
    return Ask(input=input, origin=origin, model=model, constraint=constraint, **structs(groups))


async def gather(frontend: Frontend, asks: Sequence[Ask]) -> list[Result]:
    """Return the results of all. The first failure aborts the others. Raise PhotonError."""
    if len(asks) == 1:
        return [await frontend.generate(asks[0])]
    return await _all_of([frontend.generate(ask) for ask in asks])


async def stream(frontend: Frontend, asks: Sequence[Ask], on_update: OnUpdate) -> None:
    """Pass on the updates of all as they come. The first failure aborts the others. Raise PhotonError."""
    if len(asks) == 1:
        await _streamed(frontend, asks[0], 0, on_update)
    else:
        await _all_of([_streamed(frontend, ask, i, on_update) for i, ask in enumerate(asks)])


async def _streamed(frontend: Frontend, ask: Ask, number: int, on_update: OnUpdate) -> None:
    async with await frontend.stream(ask) as updates:
        async for update in updates:
            await on_update(number, updates.start, update)


async def _all_of(works: Sequence[Awaitable[T]]) -> list[T]:
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(work: Awaitable[T]) -> T:
        async with room:
            return await work

    tasks = [asyncio.ensure_future(one(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in works:
            if asyncio.iscoroutine(work):
                work.close()  # one that never started would warn
