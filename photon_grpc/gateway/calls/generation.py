"""The requests of one HTTP call, which may be several, as asks of the front end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from photon_grpc.core.admission import MAX_LABEL_CHARS
from photon_grpc.core.ask import Ask, ChatInput, ConstraintAsk, IdsInput, Origin, TextInput
from photon_grpc.core.fields import FIELDS
from photon_grpc.core.generation import Start
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.frontend.output.answer import NO_ANSWER
from photon_grpc.frontend.output.update import Result, Update, gathered
from photon_grpc.gateway.calls.body import json_object
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.fields import Table, Values, read, structs

T = TypeVar("T")

#: Requests of one call that run at a time.
_AT_ONCE = 32
_STRICT = "tools[].strict"
_USER = "user"
#: Characters of a cache salt.
_MAX_SALT = FIELDS["salt"].max_chars

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
    return {"salt": _short(salt, _MAX_SALT)} if salt else {}


def label(origin: Origin, user: str) -> None:
    """Label the request with its end user."""
    origin.labels = ((_USER, _short(user, MAX_LABEL_CHARS)),)


def _short(text: str, max_chars: int) -> str:
    """Return the text, or its digest if it is too long: agents name users at length."""
    if len(text) <= max_chars:
        return text
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


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
    if isinstance(input, ChatInput):
        input = _without_strictness(call, input)
    groups = {group: dict(values) for group, values in options.items()}
    if call.max_queue_s is not None:
        groups.setdefault("scheduling", {}).setdefault("max_queue_duration_s", call.max_queue_s)
    return Ask(input=input, origin=origin, model=model, constraint=constraint, **structs(groups))


def _without_strictness(call: HttpCall, chat: ChatInput) -> ChatInput:
    """Return the chat without `strict` where it has no effect: no schema constrains a call that the model may omit.

    The libraries of OpenAI set it on every tool, so it is not refused, as gRPC does, but named in the answer.
    """
    if chat.tool_choice is not None or not any(tool.strict for tool in chat.tools):
        return chat
    call.note_ignored((*call.ignored, _STRICT))
    return replace(chat, tools=tuple([replace(tool, strict=None) for tool in chat.tools]))


async def gather(frontend: Frontend, asks: Sequence[Ask]) -> list[Result]:
    """Return the results of all. The first failure aborts the others. Raise PhotonError."""
    if len(asks) == 1:
        return [await frontend.generate(asks[0])]
    return await _all_of([frontend.generate(ask) for ask in asks])


async def gather_one(frontend: Frontend, ask: Ask, *, has_one_call: bool) -> Result:
    """Return a result; with `has_one_call` without what follows after its first call. Raise PhotonError."""
    if not has_one_call:
        return await frontend.generate(ask)
    kept: list[Update] = []
    starts: list[Start] = []
    has_call = False

    async def keep(number: int, start: Start, update: Update) -> None:
        nonlocal has_call
        deltas = [replace(delta, text="", answer=NO_ANSWER) for delta in update.deltas] if has_call else update.deltas
        kept.append(replace(update, deltas=tuple(deltas)))
        has_call = has_call or any(delta.tool_calls for delta in deltas)
        starts.append(start)

    await stream(frontend, (ask,), keep)
    return gathered(starts[-1], kept)


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
