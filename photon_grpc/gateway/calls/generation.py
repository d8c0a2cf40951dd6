"""The requests of one HTTP call, which may be several, as asks of the front end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from photon_grpc.core.admission import MAX_LABEL_CHARS
from photon_grpc.core.ask import Ask, ChatInput, ConstraintAsk, IdsInput, Origin, TextInput
from photon_grpc.core.fields import FIELDS
from photon_grpc.core.generation import Start
from photon_grpc.errors import FeatureNotSupported, QueueFull, QuotaExceeded
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
#: Called with the number of a request; the errors raised within it are about that one.
Naming = Callable[[int], contextlib.AbstractContextManager[None]]


def _no_naming(number: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class FrontendEndpoints:
    """Endpoints that ask a front end."""

    def __init__(self, frontend: Frontend, max_body_bytes: int) -> None:
        self._frontend = frontend
        self._max_body_bytes = max_body_bytes


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
    origin = call.origin()
    with recording_refusals(frontend, origin):
        values = read(table, await json_object(call, max_body_bytes))
        call.note_ignored(values.ignored)
        facts = frontend.model(values.get("model", ""))
        origin.arrival_s, origin.model = time.monotonic(), facts.name
        if values.get("tools") and values.get("tool_choice") != "none" and not facts.takes_tools:
            message = "tools: the chat template of this model has no place for tools (feature TOOL_CALLS)"
            raise FeatureNotSupported(message, field="tools")
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


async def gather(frontend: Frontend, asks: Sequence[Ask], naming: Naming = _no_naming) -> list[Result]:
    """Return the results of all. The first failure aborts the others. Raise PhotonError."""

    async def generate(number: int) -> Result:
        with naming(number):
            return await frontend.generate(asks[number])

    if len(asks) == 1:
        return [await generate(0)]
    return await _AllRequests(frontend, asks, generate).run()


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


async def stream(frontend: Frontend, asks: Sequence[Ask], on_update: OnUpdate, naming: Naming = _no_naming) -> None:
    """Pass on the updates of all as they come. The first failure aborts the others. Raise PhotonError."""

    async def pass_on(number: int) -> None:
        with naming(number):
            await _streamed(frontend, asks[number], number, on_update)

    if len(asks) == 1:
        await pass_on(0)
    else:
        await _AllRequests(frontend, asks, pass_on).run()


async def _streamed(frontend: Frontend, ask: Ask, number: int, on_update: OnUpdate) -> None:
    async with await frontend.stream(ask) as updates:
        async for update in updates:
            await on_update(number, updates.start, update)


class _AllRequests(Generic[T]):
    """Several requests of one call, as many at a time as there is room for. The first failure ends them all."""

    def __init__(self, frontend: Frontend, asks: Sequence[Ask], start: Callable[[int], Awaitable[T]]) -> None:
        """Take the requests; `start` begins one by its number, and raises Overloaded before it has any effect."""
        self._frontend = frontend
        self._asks = asks
        self._start = start
        self._unstarted = dict.fromkeys(range(len(asks)))
        self._most = _AT_ONCE
        self._num_running = 0
        self._ended = asyncio.Condition()

    async def run(self) -> list[T]:
        """Return the results in order. Raise PhotonError."""
        tasks = [asyncio.ensure_future(self._one(number)) for number in range(len(self._asks))]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for number in self._unstarted:
                self._frontend.refused(self._asks[number].origin, error)
            raise

    async def _one(self, number: int) -> T:
        while True:
            async with self._ended:
                await self._ended.wait_for(lambda: self._num_running < self._most)
            self._num_running += 1
            self._unstarted.pop(number, None)
            try:
                return await self._start(number)
            except (QueueFull, QuotaExceeded) as error:
                # Others of this call hold the places that it lacks: come again when one has ended.
                if self._num_running == 1 or error.is_final:
                    raise
                self._most = self._num_running - 1
            finally:
                self._num_running -= 1
                async with self._ended:
                    self._ended.notify_all()
