"""A client for AdminService: identity, changing load and quarantine of one replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from photon_grpc.admin.v1 import admin_pb2 as pb
from photon_grpc.admin.v1 import admin_pb2_grpc
from photon_grpc.client.channel import open_channel
from photon_grpc.client.status import to_error
from photon_grpc.client.trace_context import with_trace_context
from photon_grpc.errors import FeatureNotSupported, PhotonError

T = TypeVar("T")

_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
_REMEDY = (
    "either it is not the admin address, which the server logs at start: `admin service on unix:…`, or the server is "
    "older than this client and has the service as photon_grpc.v1.AdminService: use the client of its release"
)


@dataclass(frozen=True, slots=True)
class Replica:
    """The identity of a server."""

    version: str
    start_time_s: float
    device: str
    total_blocks: int
    block_size: int
    max_running: int
    max_queued: int
    num_restarts: int


@dataclass(frozen=True, slots=True)
class LoadSample:
    """A server's load at one moment. Rates are averages over about a second."""

    running: int = 0
    queued: int = 0
    queued_prompt_tokens: int = 0
    owned_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    #: Since start or reset.
    prefix_cache_hit_rate: float = 0.0
    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    step_s: float = 0.0
    num_preemptions: int = 0
    #: Tokens that speculation proposed since the start, and those of them that became output.
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """A request that crashed an engine, or may have done so."""

    fingerprint: str
    #: True: it is refused. False: it may compute alone once.
    is_quarantined: bool
    num_crashes: int
    #: Unix seconds.
    crashed_at_s: float
    #: Time until the entry is forgotten.
    left_s: float
    #: Id of the newest attempt while it was a suspect; empty if there was none.
    request_id: str
    api_key_name: str


class AdminClient:
    """A client for the AdminService of one replica. `target` is its own listener, unix:PATH or HOST:PORT."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.target = target
        self._metadata = tuple(metadata)
        self._channel = open_channel(target, credentials=credentials, retries=0, only_ready=False)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def replica(self, timeout_s: float = 10.0) -> Replica:
        """Return the identity. Raise PhotonError: Unavailable while loading, FeatureNotSupported if not served."""
        return _replica(await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s))

    async def watch_load(self, interval_s: float) -> AsyncIterator[LoadSample]:
        """Yield a sample at once, then one per change, at least `interval_s` apart. Raise PhotonError."""
        request = pb.WatchLoadRequest()
        request.min_interval.FromNanoseconds(round(interval_s * 1e9))
        call = self._stub.WatchLoad(request, metadata=with_trace_context(self._metadata))
        try:
            async for response in call:
                yield _sample(response.load)
        except grpc.aio.AioRpcError as failure:
            raise self._error(failure) from failure
        finally:
            call.cancel()

    async def quarantine(self, timeout_s: float = 10.0) -> tuple[QuarantineEntry, ...]:
        """Return the entries, the newest crash first. Raise PhotonError."""
        response = await self._call(self._stub.ListQuarantine, pb.ListQuarantineRequest(), timeout_s)
        return tuple(_suspect(each) for each in response.entries)

    async def clear_quarantine(self, fingerprints: Sequence[str] | None, timeout_s: float = 10.0) -> tuple[str, ...]:
        """Remove entries (None: all), and return the fingerprints of those that existed. Raise PhotonError."""
        request = pb.ClearQuarantineRequest(fingerprints=fingerprints, all=fingerprints is None)
        return tuple((await self._call(self._stub.ClearQuarantine, request, timeout_s)).cleared_fingerprints)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Callable[..., Awaitable[T]], request: Message, timeout_s: float) -> T:
        try:
            return await method(request, timeout=timeout_s, metadata=with_trace_context(self._metadata))
        except grpc.aio.AioRpcError as failure:
            raise self._error(failure) from failure

    def _error(self, failure: grpc.aio.AioRpcError) -> PhotonError:
        error = to_error(failure, self.target)
        if isinstance(error, FeatureNotSupported) and not error.field:  # else it refuses a field
            return FeatureNotSupported(f"{self.target} serves no AdminService under {_NAME}; {_REMEDY}")
        return error


def _replica(message: pb.GetServerInfoResponse) -> Replica:
    return Replica(
        version=message.version,
        start_time_s=message.start_time.ToNanoseconds() / 1e9,
        device=message.device,
        total_blocks=message.total_kv_blocks,
        block_size=message.kv_block_tokens,
        max_running=message.max_running_requests,
        max_queued=message.max_queued_requests,
        num_restarts=message.engine_restart_count,
    )


def _suspect(message: pb.QuarantineEntry) -> QuarantineEntry:
    return QuarantineEntry(
        fingerprint=message.fingerprint,
        is_quarantined=message.quarantined,
        num_crashes=message.crash_count,
        crashed_at_s=message.crash_time.ToNanoseconds() / 1e9,
        left_s=message.remaining_time.ToNanoseconds() / 1e9,
        request_id=message.request_id,
        api_key_name=message.api_key_name,
    )


def _sample(message: pb.Load) -> LoadSample:
    return LoadSample(
        running=message.running_requests,
        queued=message.queued_requests,
        queued_prompt_tokens=message.queued_prompt_tokens,
        owned_blocks=message.owned_kv_blocks,
        cached_blocks=message.cached_kv_blocks,
        free_blocks=message.free_kv_blocks,
        prefix_cache_hit_rate=message.prefix_cache_hit_rate,
        output_tokens_per_s=message.output_tokens_per_second,
        prompt_tokens_per_s=message.prompt_tokens_per_second,
        step_s=message.step_duration.ToNanoseconds() / 1e9,
        num_preemptions=message.preemption_count,
        draft_tokens=message.draft_token_count,
        accepted_draft_tokens=message.accepted_draft_token_count,
    )
