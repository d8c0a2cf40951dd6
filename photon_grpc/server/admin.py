"""photon_grpc.admin.v1.AdminService: operating one replica."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from photon_grpc import __version__
from photon_grpc.access.places import AT_WORK, Places, silent_call
from photon_grpc.admin.v1 import admin_pb2 as pb
from photon_grpc.admin.v1 import admin_pb2_grpc
from photon_grpc.core.admission import MAX_REQUEST_ID_CHARS, check_count
from photon_grpc.core.frames import Reply, Suspect, Verb
from photon_grpc.core.stats import Load
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.readiness import State
from photon_grpc.server.calls.call import current
from photon_grpc.server.calls.metadata import Context

#: Ids or fingerprints per call: they fit a frame, whatever --max-message-size is.
_MAX_NAMES = 256
#: Length of a fingerprint.
_MAX_HEX_DIGITS = 64
_MAX_DRAIN_S = 86_400.0
#: Open WatchLoad and Drain calls and calls that wait for the engine, together.
MAX_CALLS = 64
_DEFAULT_INTERVAL_S = 1.0
_LEAST_INTERVAL_S = 0.02
_MOST_INTERVAL_S = 3600.0


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, frontend: Frontend, drain: Callable[[float | None], None]) -> None:
        """Take `drain`, which ends the whole service within the given seconds (None: within the configured time)."""
        self._frontend = frontend
        self._drain = drain
        self._num_left = asyncio.get_running_loop().create_future()
        self._is_over = asyncio.Event()
        self._instance_id = uuid.uuid4().hex
        self._start_time = _timestamp(time.time())
        self._num_restarts = 0
        self.places = Places("calls of operators", MAX_CALLS)
        frontend.on_state(self._on_state)

    def close(self, num_left: int) -> None:
        """Answer every Drain and end every WatchLoad, once the service has drained."""
        self._num_left.set_result(num_left)
        self._is_over.set()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        facts = self._frontend.facts
        return pb.GetServerInfoResponse(
            version=__version__,
            instance_id=self._instance_id,
            start_time=self._start_time,
            device=facts.device,
            total_kv_blocks=facts.num_blocks,
            kv_block_tokens=facts.kv.block_size,
            max_running_requests=facts.max_num_seqs,
            max_queued_requests=facts.max_queue_size,
            max_batched_tokens=facts.max_num_batched_tokens,
            engine_restart_count=self._num_restarts,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(load=_load_message(self._frontend.load))

    async def WatchLoad(  # type: ignore[override]  # a coroutine that writes: cheaper than a generator
        self, request: pb.WatchLoadRequest, context: Context
    ) -> None:
        min_s = _seconds(request.min_interval, "min_interval", _MOST_INTERVAL_S)
        interval_s = max(min_s, _LEAST_INTERVAL_S) if request.HasField("min_interval") else _DEFAULT_INTERVAL_S
        with silent_call(self.places, current().caller):
            await current().send_initial_metadata(context)
            await self._send_loads(interval_s, context)

    async def _send_loads(self, interval_s: float, context: Context) -> None:
        sent = None
        while not self._is_over.is_set():
            load = self._frontend.load
            if load != sent:
                await context.write(pb.WatchLoadResponse(load=_load_message(load)))
                sent = load
            try:
                await asyncio.wait_for(self._is_over.wait(), interval_s)
            except TimeoutError:
                continue

    async def AbortRequests(self, request: pb.AbortRequestsRequest, context: Context) -> pb.AbortRequestsResponse:
        request_ids = _names(request.request_ids, request.all, "request_ids", MAX_REQUEST_ID_CHARS)
        if not request_ids and not request.all:
            return pb.AbortRequestsResponse()
        reply = await self._control("abort_requests", request_ids)
        return pb.AbortRequestsResponse(aborted_request_ids=reply.names)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        timeout_s = _seconds(request.timeout, "timeout", _MAX_DRAIN_S) if request.HasField("timeout") else None
        with silent_call(self.places, current().caller):
            self._drain(timeout_s)
            # Shielded, since the other Drain calls wait for the same future.
            return pb.DrainResponse(remaining_requests=await asyncio.shield(self._num_left))

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        reply = await self._control("reset_prefix_cache")
        return pb.ResetPrefixCacheResponse(freed_blocks=reply.value)

    async def ListQuarantine(self, request: pb.ListQuarantineRequest, context: Context) -> pb.ListQuarantineResponse:
        reply = await self._control("list_quarantine")
        return pb.ListQuarantineResponse(entries=[_entry_message(each) for each in reply.suspects])

    async def ClearQuarantine(self, request: pb.ClearQuarantineRequest, context: Context) -> pb.ClearQuarantineResponse:
        fingerprints = _names(request.fingerprints, request.all, "fingerprints", _MAX_HEX_DIGITS)
        if not fingerprints and not request.all:
            return pb.ClearQuarantineResponse()
        reply = await self._control("clear_quarantine", fingerprints)
        return pb.ClearQuarantineResponse(cleared_fingerprints=reply.names)

    async def _control(self, verb: Verb, names: tuple[str, ...] = ()) -> Reply:
        """Return the engine's reply. Raise Unavailable, QueueFull."""
        with self.places.take(current().caller, AT_WORK):
            return await self._frontend.control(verb, names)

    def _on_state(self, state: State) -> None:
        self._num_restarts += state is State.RESTARTING


def _load_message(load: Load) -> pb.Load:
    step = Duration()
    step.FromNanoseconds(round(load.step_s * 1e9))
    return pb.Load(
        sample_time=_timestamp(time.time()),
        running_requests=load.running,
        queued_requests=load.queued,
        queued_prompt_tokens=load.queued_prompt_tokens,
        owned_kv_blocks=load.owned_blocks,
        cached_kv_blocks=load.cached_blocks,
        free_kv_blocks=load.free_blocks,
        kv_utilization=load.owned_blocks / load.total_blocks if load.total_blocks else 0.0,
        prefix_cache_hit_rate=load.cached_prompt_tokens / load.prompt_tokens if load.prompt_tokens else 0.0,
        output_tokens_per_second=load.output_tokens_per_s,
        prompt_tokens_per_second=load.prompt_tokens_per_s,
        step_duration=step,
        preemption_count=load.preemptions,
        draft_token_count=load.draft_tokens,
        accepted_draft_token_count=load.accepted_draft_tokens,
    )


def _entry_message(suspect: Suspect) -> pb.QuarantineEntry:
    remaining = Duration()
    remaining.FromNanoseconds(round(suspect.left_s * 1e9))
    return pb.QuarantineEntry(
        fingerprint=suspect.fingerprint,
        quarantined=suspect.is_quarantined,
        crash_count=suspect.num_crashes,
        crash_time=_timestamp(suspect.crashed_at_s),
        remaining_time=remaining,
        request_id=suspect.request_id,
        api_key_name=suspect.owner,
    )


def _names(names: Collection[str], is_all: bool, field: str, max_chars: int) -> tuple[str, ...]:
    """Return the names that can exist. Raise InvalidRequest unless either names or `all` are set, or for too many."""
    if bool(names) is is_all:
        raise InvalidRequest(f"one of {field} and all must be set", field=field)
    check_count(len(names), _MAX_NAMES, field)
    return tuple(each for each in names if len(each) <= max_chars)


def _timestamp(time_s: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(round(time_s * 1e9))
    return stamp


def _seconds(duration: Duration, field: str, limit_s: float) -> float:
    """Return a Duration in seconds. Raise InvalidRequest if it is negative, malformed or too long."""
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0 <= seconds <= limit_s or abs(duration.nanos) >= 1_000_000_000:
        raise InvalidRequest(f"{field} must be between 0 and {limit_s:g} s", field=field)
    return seconds
