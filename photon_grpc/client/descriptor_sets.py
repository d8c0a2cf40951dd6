"""Large descriptor sets, sent once per channel and named by their digest afterwards.

A replica that does not hold the set refuses the digest before any output; then the same request goes out with the set.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from photon_grpc.client.message_type import DescribedType, describe
from photon_grpc.client.newer_fields import NewerFields
from photon_grpc.client.resume import OpenCall, is_heartbeat
from photon_grpc.client.status import to_error
from photon_grpc.client.stream import MessageCall
from photon_grpc.errors import DescriptorSetUnknown, InvalidRequest, NotAllowed, PhotonError
from photon_grpc.v1 import inference_pb2 as pb

R = TypeVar("R")
#: Sends a request with a timeout in seconds and returns its answer.
Send: TypeAlias = Callable[[pb.GenerateRequest, float], Awaitable[R]]

#: Sets below this size always travel: they cost no measurable time, and an unknown digest costs a call.
MIN_BYTES = 8192
#: Calls that carry the set after an unknown digest. Replicas are called in turn, so each of as many gets it; with one
#: such call the second call for an unknown digest could always go to the same replica.
REPEATS = 16
#: Digests that are kept; the set that was accepted longest ago is sent again.
MAX_DIGESTS = 1024
_SET_FIELD = "structured_output.protobuf.file_descriptor_set"
_SHORTEST_S = 0.001

_logger = logging.getLogger(__name__)


class SetInRequest:
    """The descriptor set of a request that has none or carries it."""

    def opener(self, open_call: OpenCall) -> OpenCall:
        """Return what opens the request's calls."""
        return open_call

    async def answer(self, send: Send[R], request: pb.GenerateRequest, timeout_s: float) -> R:
        """Send the request and return its answer. Raise PhotonError."""
        return await send(request, timeout_s)


SET_IN_REQUEST = SetInRequest()


class AllInRequests:
    """Descriptor sets that always travel."""

    def detach(self, request: pb.GenerateRequest, message_type: type[Message] | None) -> SetInRequest:
        return SET_IN_REQUEST


ALL_IN_REQUESTS = AllInRequests()


class DescriptorSets(AllInRequests):
    """The large sets that the servers of a channel hold, as far as is known.

    Servers that ignore unknown fields know no digests, so they always get the set.
    """

    def __init__(self, newer_fields: NewerFields) -> None:
        self._newer_fields = newer_fields
        #: Digest of an accepted set -> calls that must carry the set until the digest may stand for it.
        self._num_owed: dict[bytes, int] = {}
        #: The task that asks whether the servers refuse unknown fields.
        self._asking: asyncio.Task[None] | None = None
        #: The key may generate and not ask. Digests are sent; an older server reports the missing set.
        self._may_not_ask = False

    def detach(self, request: pb.GenerateRequest, message_type: type[Message] | None) -> SetInRequest:
        """Take a large set out of the request."""
        described = None if message_type is None else describe(message_type)
        if described is None or len(described.files) < MIN_BYTES:
            return SET_IN_REQUEST
        request.structured_output.protobuf.ClearField("file_descriptor_set")
        return _DetachedSet(self, described)

    def may_name(self, digest: bytes) -> bool:
        """Return whether the next call may name the set by its digest."""
        num_owed = self._num_owed.get(digest)
        if num_owed is None or not (self._newer_fields.is_refusing or self._may_not_ask):
            return False
        self._num_owed[digest] = max(num_owed - 1, 0)
        return num_owed == 0

    def unknown(self, digest: bytes) -> None:
        """Note that a server does not hold the set."""
        self._note(digest, REPEATS)

    def accepted(self, digest: bytes) -> None:
        """Note that a server has accepted the set. Ask, beside what runs, whether the servers know digests."""
        self._note(digest, self._num_owed.get(digest, 0))
        if self._newer_fields.is_refusing is None and not self._may_not_ask and self._asking is None:
            self._asking = asyncio.create_task(self._ask())

    def forget(self) -> None:
        """Forget everything: the channel is closed."""
        asking, self._asking = self._asking, None
        self._may_not_ask = False
        self._num_owed.clear()
        if asking is not None:
            asking.cancel()

    def _note(self, digest: bytes, num_owed: int) -> None:
        self._num_owed.pop(digest, None)
        self._num_owed[digest] = num_owed
        if len(self._num_owed) > MAX_DIGESTS:
            del self._num_owed[next(iter(self._num_owed))]

    async def _ask(self) -> None:
        try:
            await self._newer_fields.ask()
        except NotAllowed:
            self._may_not_ask = True
        except Exception as error:
            # Only a saving is lost, and the next accepted set asks again.
            _logger.debug("the server did not name its features: %r", error)
        finally:
            # After `forget` another task may ask.
            if self._asking is asyncio.current_task():
                self._asking = None


class _DetachedSet(SetInRequest):
    """The large set of one request, which may be sent several times."""

    def __init__(self, sets: DescriptorSets, described: DescribedType) -> None:
        self._sets = sets
        self._described = described

    def opener(self, open_call: OpenCall) -> OpenCall:
        return lambda request, timeout_s: _TypedCall(self, open_call, request, timeout_s)

    async def answer(self, send: Send[R], request: pb.GenerateRequest, timeout_s: float) -> R:
        is_named, started_s = self.may_name(), time.monotonic()
        try:
            answer = await send(self.filled(request, is_named=is_named), timeout_s)
        except PhotonError as error:
            if not is_named or not self.is_unknown(error):
                raise
            left_s = max(timeout_s - (time.monotonic() - started_s), _SHORTEST_S)
            answer = await send(self.filled(request, is_named=False), left_s)
        self.accepted()
        return answer

    def may_name(self) -> bool:
        """Return whether the next call may name the set by its digest."""
        return self._sets.may_name(self._described.digest)

    def is_unknown(self, failure: grpc.aio.AioRpcError | PhotonError) -> bool:
        """Return whether a call failed because it named the set; an older server reports that the set is missing."""
        error = failure if isinstance(failure, PhotonError) else to_error(failure, "")
        is_older = type(error) is InvalidRequest and error.field == _SET_FIELD
        if not is_older and not isinstance(error, DescriptorSetUnknown):
            return False
        self._sets.unknown(self._described.digest)
        return True

    def accepted(self) -> None:
        self._sets.accepted(self._described.digest)

    def filled(self, request: pb.GenerateRequest, *, is_named: bool) -> pb.GenerateRequest:
        """Return the request with the digest or the set."""
        filled = pb.GenerateRequest()
        filled.CopyFrom(request)
        if is_named:
            filled.structured_output.protobuf.file_descriptor_set_sha256 = self._described.digest
        else:
            filled.structured_output.protobuf.file_descriptor_set = self._described.files
        return filled


class _TypedCall:
    """A stream whose request may name its set by a digest, and its second call with the set if that is unknown."""

    def __init__(self, detached: _DetachedSet, open_call: OpenCall, request: pb.GenerateRequest, timeout_s: float):
        self._detached = detached
        self._open_call = open_call
        self._request = request
        self._ends_s = time.monotonic() + timeout_s
        self._is_named = detached.may_name()
        self._is_accepted = False
        self._is_cancelled = False
        self._call: MessageCall = open_call(detached.filled(request, is_named=self._is_named), timeout_s)

    async def read(self) -> Any:
        """Return the next message, EOF after the last. Raise AioRpcError, PhotonError."""
        try:
            message = await self._call.read()
        except (grpc.aio.AioRpcError, PhotonError) as failure:
            if not self._is_named or not self._detached.is_unknown(failure):
                raise
            message = await self._opened_again().read()
        if not self._is_accepted and isinstance(message, pb.StreamGenerateResponse) and not is_heartbeat(message):
            self._is_accepted = True
            self._detached.accepted()
        return message

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        self._is_cancelled = True
        self._call.cancel()

    def _opened_again(self) -> MessageCall:
        """Return the call with the set."""
        if self._is_cancelled:
            raise asyncio.CancelledError
        self._is_named = False
        left_s = max(self._ends_s - time.monotonic(), _SHORTEST_S)
        self._call = self._open_call(self._detached.filled(self._request, is_named=False), left_s)
        return self._call
