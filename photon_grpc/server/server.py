"""The server: build, start, serve, drain. Which services there are, and how the transport is set, is read here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from photon_grpc.config.flags import ServerConfig
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.server import addresses
from photon_grpc.server.calls import metadata
from photon_grpc.server.calls.guard import CallRules, Guard
from photon_grpc.server.inference import InferenceService
from photon_grpc.server.models import ModelService
from photon_grpc.server.observe.failure_log import FailureLog
from photon_grpc.server.standard import health, reflection
from photon_grpc.server.standard.load_report import LoadReports, OpenRcaService
from photon_grpc.server.tls import Certificates
from photon_grpc.server.wire import descriptors
from photon_grpc.server.wire.writer import StreamWriter
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

#: A reader that takes nothing for so long is cut off.
STALL_LIMIT_S = 120.0
#: Time for calls, after the drain, to carry their last message and status to the client.
LAST_WORDS_S = 2.0
#: Each holds its message. Far beyond any queue, whose front end answers with a reason; not without end.
_MAX_UNSEEN_CALLS = 1 << 15
#: Clients acknowledge our SETTINGS as soon as they have them. Who has not after so long is no client of gRPC: headers
#: of 16 MiB are let in until then, and those behind a message are seen by nobody but gRPC.
_SETTINGS_TIMEOUT_MS = 10_000

_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    descriptors.HEALTH,
    descriptors.LOAD_REPORTS,
)


class Server:
    """One grpc.aio server in front of one front end. All calls belong to the running event loop."""

    def __init__(
        self,
        frontend: Frontend,
        *,
        config: ServerConfig,
        rules: CallRules | None = None,
        certificates: Certificates | None = None,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        """`rules` hold for every call; unset, all are let in and none is counted."""
        self._frontend = frontend
        self._config = config
        self._reports = LoadReports(frontend)
        rules = rules or CallRules(FailureLog())
        self._writer = StreamWriter(stall_limit_s)
        self._inference = InferenceService(frontend, self._writer, rules.failures)
        self._reflecting = reflection.places()
        self._guard = Guard(rules, self._reports.trailers, reading=(self._reflecting, self._inference.places))
        self._certificates = certificates
        self._health = health.HealthService(frontend)
        self._orca = OpenRcaService(self._reports, self._writer)
        self._grpc: grpc.aio.Server | None = None
        self._watches: tuple[asyncio.Task[None], ...] = ()

    async def start(self, addresses: Sequence[str], *, reuse_port: bool) -> tuple[str, ...]:
        """Listen and answer; return the addresses bound. With `reuse_port` other processes may share them.

        Raise ConfigError for an address that cannot be bound; nothing listens then.
        """
        server = self._build(reuse_port)
        try:
            bound = self._bind_all(server, addresses, reuse_port)
        except BaseException:
            # grpc.aio lets go of what it bound only if it was started.
            await server.start()
            await server.stop(None)
            raise
        await server.start()
        self._grpc = server
        self._watches = (asyncio.create_task(self._writer.watch()), asyncio.create_task(self._reports.watch()))
        return bound

    async def drain_and_stop(self, timeout_s: float) -> int:
        """Not ready at once; new requests get DRAINING while running ones have `timeout_s` to finish; then nothing
        listens. Return how many ran when the time was over.

        The port stays open meanwhile, so that health checks and the newly refused are answered.
        """
        if self._grpc is None:
            return 0
        server, self._grpc = self._grpc, None
        self._health.withdraw()
        num_left = await self._frontend.drain(timeout_s)
        self._health.close()
        self._orca.close()
        await server.stop(LAST_WORDS_S)
        for watch in self._watches:
            watch.cancel()
        return num_left

    def _build(self, reuse_port: bool) -> grpc.aio.Server:
        options = (*transport_options(self._config.max_message_size, reuse_port), *age_options(self._config))
        server = grpc.aio.server(interceptors=(self._guard,), options=options)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self._frontend), server)
        reflected = reflection.handlers(_SERVICES, self._reflecting)
        server.add_generic_rpc_handlers((self._health.handler(), self._orca.handler(), *reflected))
        return server

    def _bind_all(self, server: grpc.aio.Server, wanted: Sequence[str], reuse_port: bool) -> tuple[str, ...]:
        credentials = self._certificates.credentials() if self._certificates else None
        return tuple(
            addresses.bind(server, address, reuse_port=reuse_port, credentials=credentials) for address in wanted
        )


def age_options(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    """Without an age, gRPC lets connections stay; without a grace, it lets their calls run to their end."""
    ages = (
        ("grpc.max_connection_age_ms", config.max_connection_age),
        ("grpc.max_connection_age_grace_ms", config.max_connection_age_grace),
    )
    return tuple((name, round(age_s * 1000)) for name, age_s in ages if age_s is not None)


def transport_options(max_message_bytes: int, reuse_port: bool) -> tuple[tuple[str, Any], ...]:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # It makes windows of megabytes, which unread calls would hold. A message that is read gets a window of its own
        # size.
        ("grpc.http2.bdp_probe", 0),
        # On by default: a second server would bind the same port and take half of the connections.
        ("grpc.so_reuseport", int(reuse_port)),
        # All that fits, and nothing more: by default gRPC refuses what has more than 8 KiB at random.
        ("grpc.max_metadata_size", metadata.MAX_BYTES),
        ("grpc.absolute_max_metadata_size", metadata.MAX_BYTES),
        ("grpc.http2.settings_timeout", _SETTINGS_TIMEOUT_MS),
        # Connections take turns after each call, not after 32: who is to be hung up on (metadata.refuse_oversized) is
        # met before thousands of its calls are parsed. No limit of streams: one that is below all seats and the queue
        # makes callers wait in their client, silently, and one above it holds no attack up.
        ("grpc.http2.max_requests_per_read", 1),
        # Above 1,000 calls that Python has not yet seen, gRPC would cancel some at random, with no reason given.
        # QUEUE_FULL gives one.
        ("grpc.server.max_pending_requests", _MAX_UNSEEN_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_UNSEEN_CALLS),
        # A client that vanished silently is noticed within 18 s, also while it only waits.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 8_000),
        ("grpc.http2.ping_timeout_ms", 8_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping as often as that: else a long silent call dies of "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
    )
