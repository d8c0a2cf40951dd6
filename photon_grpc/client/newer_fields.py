"""Fields that change the answer and that an older server would silently ignore.

Requests with a field that has the option `needs_refusal` go only to servers with FEATURE_UNKNOWN_FIELDS_REFUSED, which
refuse what they do not know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from photon_grpc.client.resume import OpenCall, is_heartbeat
from photon_grpc.client.stream import MessageCall
from photon_grpc.errors import DeadlinePassed, FeatureNotSupported, ScopeRequired
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2
from photon_grpc.v1.annotations_pb2 import needs_refusal

#: Asks the server for the features of its default model.
AskFeatures = Callable[[], Awaitable[model_pb2.GetModelResponse]]
#: Opens a call with a timeout in seconds.
Open = Callable[[float], MessageCall]

_SHORTEST_S = 0.001


class NewerFields:
    """The check of requests to one channel, which asks for features once and only for requests with such a field.

    A channel may lead to several replicas, and one answers the question for all. So the answers to such requests are
    checked too: servers that ignore unknown fields send no `release`.
    """

    def __init__(self, ask: AskFeatures, target: str) -> None:
        self._ask = ask
        self._target = target
        self.forget()

    def forget(self) -> None:
        """Forget the answer: the channel is closed."""
        self._asking = asyncio.Lock()
        #: The servers refuse fields that they do not know; None: not asked.
        self.is_refusing: bool | None = None

    async def ask(self) -> bool:
        """Return whether the servers refuse fields that they do not know, and ask unless they do. Raise PhotonError."""
        async with self._asking:
            if not self.is_refusing:
                self.is_refusing = model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED in (await self._ask()).model.features
            return self.is_refusing

    async def check(self, request: Message, timeout_s: float) -> float:
        """Return the time that is left for the request.

        Raise FeatureNotSupported if the server would ignore a field of it, DeadlinePassed, and what GetModel raises.
        """
        if not self.must_ask(request):
            return timeout_s
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                is_refusing = await self.ask()
        except TimeoutError:
            raise DeadlinePassed(f"{timeout_s:g} s have passed; {self._target} did not name its features") from None
        except ScopeRequired as error:
            field = newer_field(request)
            raise ScopeRequired(f"{field} needs the server's features to be known: {error}", field=field) from error
        if not is_refusing:
            raise self._ignored(newer_field(request))
        return max(timeout_s - (time.monotonic() - started_s), _SHORTEST_S)

    def check_answer(self, request: Message, release: str) -> None:
        """Raise FeatureNotSupported if the server that answered has ignored a field of `request`."""
        if release or not (field := newer_field(request)):
            return
        self.is_refusing = None
        raise self._ignored(field)

    def must_ask(self, request: Message) -> bool:
        """Return whether `check` has to call the server."""
        return not self.is_refusing and newer_field(request) != ""

    def opened(self, request: Message, open_call: Open, timeout_s: float) -> MessageCall:
        """Return the call that `open_call` opens, at once or after the check."""
        if not self.must_ask(request):
            return open_call(timeout_s)
        return _CheckedCall(partial(self.check, request, timeout_s), open_call)

    def opener(self, request: pb.GenerateRequest, open_call: OpenCall) -> OpenCall:
        """Return what opens the request's calls, each of which may reach another replica."""
        if not newer_field(request):
            return open_call
        check_release = partial(self.check_answer, request)
        return lambda sent, timeout_s: _AnswerCheckedCall(open_call(sent, timeout_s), check_release)

    def _ignored(self, field: str) -> FeatureNotSupported:
        problem = f"{self._target} is older than {field} and would ignore it; upgrade the server first"
        return FeatureNotSupported(problem, field=field)


class _CheckedCall:
    """A call that is opened once its request has been checked."""

    def __init__(self, check: Callable[[], Awaitable[float]], open_call: Open) -> None:
        self._opening = asyncio.ensure_future(_after(check, open_call))

    async def read(self) -> Any:
        """Return the next message, EOF after the last. Raise AioRpcError, PhotonError."""
        # Shielded, since a reader that gives up waiting may read again.
        return await (await asyncio.shield(self._opening)).read()

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        if not self._opening.cancel() and not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().cancel()


async def _after(check: Callable[[], Awaitable[float]], open_call: Open) -> MessageCall:
    return open_call(await check())


class _AnswerCheckedCall:
    """A call that ends if its first message shows that the server has ignored a field."""

    def __init__(self, call: MessageCall, check_release: Callable[[str], None]) -> None:
        self._call = call
        self._check_release = check_release
        self._is_checked = False

    async def read(self) -> Any:
        """Return the next message, EOF after the last. Raise AioRpcError, PhotonError."""
        message = await self._call.read()
        if not self._is_checked and isinstance(message, pb.StreamGenerateResponse) and not is_heartbeat(message):
            self._check(message.start.release)
        return message

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        self._call.cancel()

    def _check(self, release: str) -> None:
        try:
            self._check_release(release)
        except FeatureNotSupported:
            self._call.cancel()
            raise
        self._is_checked = True


def newer_field(message: Message, path: str = "") -> str:
    """Return the path of the first set field with the option `needs_refusal`; "" if there is none."""
    for leading in _leading_fields(message.DESCRIPTOR):
        value = getattr(message, leading.name)
        if not (message.HasField(leading.name) if leading.has_presence else value):
            continue
        here = f"{path}.{leading.name}" if path else leading.name
        if leading.is_marked:
            return here
        held = ((each, f"{here}[{at}]") for at, each in enumerate(value)) if leading.is_repeated else ((value, here),)
        for each, inner in held:
            if found := newer_field(each, inner):
                return found
    return ""


class _LeadingField(NamedTuple):
    """A field that has the option, or leads to one that has it."""

    name: str
    is_marked: bool
    is_repeated: bool
    has_presence: bool


@lru_cache(maxsize=64)
def _leading_fields(message: Descriptor) -> tuple[_LeadingField, ...]:
    """Return the fields that lead to a marked one."""
    return tuple(
        _LeadingField(field.name, _is_marked(field), field.is_repeated, field.has_presence)
        for field in message.fields
        if _is_marked(field) or (field.message_type is not None and _leading_fields(field.message_type))
    )


def _is_marked(field: FieldDescriptor) -> bool:
    return bool(field.GetOptions().Extensions[needs_refusal])
