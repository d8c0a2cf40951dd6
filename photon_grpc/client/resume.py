"""A stream that, when cut off, continues at another server from the ids received and with the same seed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from photon_grpc.client.continuation import is_bit_exact, tell
from photon_grpc.client.retry_policy import Attempts, RetryPolicy
from photon_grpc.client.status import to_error
from photon_grpc.client.stream import MessageCall
from photon_grpc.errors import PhotonError
from photon_grpc.v1 import inference_pb2 as pb

#: Sends a request with a timeout in seconds.
OpenCall = Callable[[pb.GenerateRequest, float], MessageCall]

_SHORTEST_S = 0.001


class ResumingCall:
    """One StreamGenerate call made of as many calls as necessary.

    If the policy resumes, it requests ids, and removes them for a caller who did not. The caller sees one stream: texts
    without gaps, usage and timing of the whole, and one start, or another where a continuation is not bit-exact. A
    request with several outputs cannot be continued; its error says so.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        open_call: OpenCall,
        target: str,
        own_timeout_s: float | None,
        policy: RetryPolicy,
    ) -> None:
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        self._open_call = open_call
        self._target = target
        timeout_s = policy.timeout_of(own_timeout_s)
        self._attempts = Attempts(policy, timeout_s)
        self._hides_ids = policy.resumes and not request.output.token_ids
        if policy.resumes:
            self._request.output.token_ids = True
        self._ids: list[int] = []
        #: Of the server whose ids came last.
        self._numerics_version = ""
        #: The last message has arrived; only the status may still be lost.
        self._is_complete = False
        self._first_s = 0.0
        #: The current call has sent nothing but heartbeats.
        self._is_silent = True
        #: The number of ids from which the current call continues, and the time that earlier calls took.
        self._num_continued = 0
        self._before_s = 0.0
        self._cancelled = asyncio.Event()
        self._call = open_call(self._request, timeout_s)

    async def read(self) -> Any:
        """Return the next message, EOF after the last. Raise PhotonError."""
        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as failure:
                if self._is_complete:
                    return grpc.aio.EOF
                error = to_error(failure, self._target)
                error.__cause__ = failure
                await self._resume(error)
            except PhotonError as error:
                await self._resume(error)
            else:
                return self._merged(message) if isinstance(message, pb.StreamGenerateResponse) else message

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        self._cancelled.set()
        self._call.cancel()

    # -- received messages ---------------------------------------------------------------------------------------------

    def _merged(self, message: pb.StreamGenerateResponse) -> pb.StreamGenerateResponse:
        if self._is_silent:
            if is_heartbeat(message):
                self._attempts.has_heartbeat = True
                return message
            self._is_silent = False
            self._read_start(message)
        self._attempts.progress()
        for delta in message.deltas:
            self._ids.extend(delta.token_ids)
            if self._hides_ids:
                delta.ClearField("token_ids")
        if self._num_continued:
            self._add_totals(message)
        self._is_complete = message.HasField("timing")
        return message

    def _read_start(self, message: pb.StreamGenerateResponse) -> None:
        if self._attempts.has_begun:
            self._compare(message)
        elif message.HasField("start"):
            self._begin(message.start)

    def _compare(self, message: pb.StreamGenerateResponse) -> None:
        """Remove the start of a continuation, unless it is not bit-exact."""
        before, self._numerics_version = self._numerics_version, message.start.numerics_version
        if is_bit_exact(before, self._numerics_version):
            message.ClearField("start")
        else:
            tell(self._request.request_id, before, self._numerics_version)
            message.start.SetInParent()

    def _begin(self, start: pb.GenerationStart) -> None:
        self._attempts.has_begun = True
        self._first_s = self._attempts.spent_s
        self._request.request_id = start.request_id
        self._request.sampling.seed = start.seed
        self._numerics_version = start.numerics_version

    def _add_totals(self, message: pb.StreamGenerateResponse) -> None:
        """Turn the last call's usages and timing into those of all calls. The ids it continues from are output."""
        for delta in message.deltas:
            if delta.HasField("usage"):
                delta.usage.output_tokens += self._num_continued
        if message.HasField("usage"):
            usage = message.usage
            usage.output_tokens += self._num_continued
            usage.prompt_tokens -= self._num_continued
            usage.cached_prompt_tokens = min(usage.cached_prompt_tokens, usage.prompt_tokens)
        if message.HasField("timing"):
            # The lost server's times are lost too, so the client's clock replaces them.
            _set(message.timing.first_token_duration, self._first_s)
            _set(message.timing.total_duration, self._before_s + message.timing.total_duration.ToNanoseconds() / 1e9)

    # -- resuming ------------------------------------------------------------------------------------------------------

    async def _resume(self, error: PhotonError) -> None:
        """Wait, then send the rest of the request. Raise `error` if that is useless."""
        num_outputs = self._request.sampling.num_outputs
        pause_s = self._attempts.pause_s(error)
        if self._attempts.has_begun and num_outputs > 1:
            error.args = (f"{error}; a stream of {num_outputs} outputs cannot be resumed",)
            raise error
        await self._sleep(pause_s)
        left_s = self._attempts.left_s(error)
        self._before_s = self._attempts.spent_s
        self._num_continued = len(self._ids)
        self._is_silent = True
        self._call = self._open_call(self._continued(left_s), left_s)

    async def _sleep(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._cancelled.wait()
        if self._cancelled.is_set():
            raise asyncio.CancelledError

    def _continued(self, left_s: float) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        if not self._attempts.has_begun:
            return request
        request.continue_from.ids.extend(self._ids)
        # The caller has these since the first token.
        request.output.ClearField("prompt_token_ids")
        request.output.ClearField("prompt_logprobs")
        if request.scheduling.HasField("timeout"):
            _set(request.scheduling.timeout, left_s)
        if request.stop.HasField("max_duration"):
            limit_s = request.stop.max_duration.ToNanoseconds() / 1e9
            _set(request.stop.max_duration, limit_s - self._before_s)
        return request


def is_heartbeat(message: pb.StreamGenerateResponse) -> bool:
    """Return whether a message has only a sequence."""
    return not (message.deltas or message.HasField("start") or message.HasField("timing"))


def _set(duration: Duration, seconds: float) -> None:
    duration.FromNanoseconds(round(max(seconds, _SHORTEST_S) * 1e9))
