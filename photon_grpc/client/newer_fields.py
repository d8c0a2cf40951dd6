"""Fields that change the answer and that an older server would silently ignore.

Requests with a field that has the option `needs_refusal` go only to servers with FEATURE_UNKNOWN_FIELDS_REFUSED, which
refuse what they do not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from photon_grpc.client.stream import MessageCall
from photon_grpc.errors import FeatureNotSupported, ScopeRequired
from photon_grpc.v1 import model_pb2
from photon_grpc.v1.annotations_pb2 import needs_refusal

#: Asks the server for the features of its default model.
AskFeatures = Callable[[], Awaitable[model_pb2.GetModelResponse]]


class NewerFields:
    """The check of requests to one channel, which asks for features once and only for requests with such a field."""

    def __init__(self, ask: AskFeatures, target: str) -> None:
        self._ask = ask
        self._target = target
        self._asking = asyncio.Lock()
        #: The server has the feature. Kept, since servers are not replaced by older ones.
        self._is_refusing = False

    async def check(self, request: Message) -> None:
        """Raise FeatureNotSupported if the server would ignore a field of `request`, and what GetModel raises."""
        if self.must_ask(request):
            async with self._asking:
                self._is_refusing = self._is_refusing or await self._has_feature(request)
            if not self._is_refusing:
                field = newer_field(request)
                problem = f"{self._target} is older than {field} and would ignore it; upgrade the server first"
                raise FeatureNotSupported(problem, field=field)

    def must_ask(self, request: Message) -> bool:
        """Return whether `check` has to call the server."""
        return not self._is_refusing and newer_field(request) != ""

    def opened(self, request: Message, open_call: Callable[[], MessageCall]) -> MessageCall:
        """Return the call that `open_call` opens, at once or after the check."""
        return _CheckedCall(partial(self.check, request), open_call) if self.must_ask(request) else open_call()

    async def _has_feature(self, request: Message) -> bool:
        try:
            return model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED in (await self._ask()).model.features
        except ScopeRequired as error:
            field = newer_field(request)
            raise ScopeRequired(f"{field} needs a look at the server's features first: {error}", field=field) from error


class _CheckedCall:
    """A call that is opened once its request has been checked."""

    def __init__(self, check: Callable[[], Awaitable[None]], open_call: Callable[[], MessageCall]) -> None:
        self._opening = asyncio.ensure_future(_after(check, open_call))

    async def read(self) -> Any:
        """Return the next message, EOF after the last. Raise AioRpcError, PhotonError."""
        # Shielded, since a reader that gives up waiting may read again.
        return await (await asyncio.shield(self._opening)).read()

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        if not self._opening.cancel() and not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().cancel()


async def _after(check: Callable[[], Awaitable[None]], open_call: Callable[[], MessageCall]) -> MessageCall:
    await check()
    return open_call()


def newer_field(message: Message, path: str = "") -> str:
    """Return the path of the first set field with the option `needs_refusal`; "" if there is none."""
    for way in _ways(message.DESCRIPTOR):
        value = getattr(message, way.name)
        if not (message.HasField(way.name) if way.has_presence else value):
            continue
        here = f"{path}.{way.name}" if path else way.name
        if way.is_marked:
            return here
        held = ((each, f"{here}[{at}]") for at, each in enumerate(value)) if way.is_repeated else ((value, here),)
        for each, inner in held:
            if found := newer_field(each, inner):
                return found
    return ""


class _Way(NamedTuple):
    """A field that has the option, or whose message leads to one that has it."""

    name: str
    is_marked: bool
    is_repeated: bool
    has_presence: bool


@lru_cache(maxsize=64)
def _ways(message: Descriptor) -> tuple[_Way, ...]:
    return tuple(
        _Way(field.name, _is_marked(field), field.is_repeated, field.has_presence)
        for field in message.fields
        if _is_marked(field) or (field.message_type is not None and _ways(field.message_type))
    )


def _is_marked(field: FieldDescriptor) -> bool:
    return bool(field.GetOptions().Extensions[needs_refusal])
