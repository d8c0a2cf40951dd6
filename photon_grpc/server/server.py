"""The server: build, start, serve, drain. This file lists the services and the transport options."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from photon_grpc.config.flags import ServerConfig
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server import addresses
from photon_grpc.server.calls import metadata
from photon_grpc.server.calls.guard import CallRules, Guard
from photon_grpc.server.inference import InferenceService
from photon_grpc.server.models import ModelService
from photon_grpc.server.services.answering import NO_OTHERS, Answering, OtherServices
from photon_grpc.server.standard import health, reflection
from photon_grpc.server.standard.load_report import LoadReports, OpenRcaService
from photon_grpc.server.tls import Certificates
from photon_grpc.server.wire import descriptors
from photon_grpc.server.wire.writer import StreamWriter
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

#: A reader that reads nothing for this long is cut off.
STALL_LIMIT_S = 120.0
#: Time after the drain for calls to send their last message and status.
CLOSING_S = 2.0
#: Calls that Python has not seen yet; each holds its message. Far above any queue, so that the front end can refuse
#: with a reason.
_MAX_UNSEEN_CALLS = 1 << 15
#: Clients acknowledge our SETTINGS as soon as they arrive; one that has not by now is no gRPC client. Until then gRPC
#: accepts headers of 16 MiB, and nobody but gRPC sees headers that follow a message.
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
        services: OtherServices = NO_OTHERS,
    ) -> None:
        """Build the services. `rules` hold for every call; by default all calls are admitted and none is counted.

        `services` are served beside ours.
        """
        self._frontend = frontend
        self._config = config
        self._reports = LoadReports(frontend)
        rules = rules or CallRules(FailureLog())
        self._writer = StreamWriter(stall_limit_s)
        self._inference = InferenceService(frontend, self._writer, rules.failures)
        self._reflecting = reflection.places()
        reading = (self._reflecting, self._inference.places)
        self._services = services.services
        self._answering = Answering(services.services, frontend, self._writer, services.form)
        self._guard = Guard(
            rules, self._reports.trailers, lambda: frontend.numerics_version, reading, self._answering.methods()
        )
        self._certificates = certificates
        self._health = health.HealthService(frontend, services.services.names)
        self._orca = OpenRcaService(self._reports, self._writer)
        self._grpc: grpc.aio.Server | None = None
        self._watches: tuple[asyncio.Task[None], ...] = ()

    async def start(self, addresses: Sequence[str], *, reuse_port: bool) -> tuple[str, ...]:
        """Listen and return the bound addresses. Raise ConfigError; then nothing listens."""
        server = self._build(reuse_port)
        try:
            bound = self._bind_all(server, addresses, reuse_port)
        except BaseException:
            # grpc.aio releases what it bound only if it was started.
            await server.start()
            await server.stop(None)
            raise
        await server.start()
        self._grpc = server
        self._watches = (asyncio.create_task(self._writer.watch()), asyncio.create_task(self._reports.watch()))
        return bound

    async def drain_and_stop(self, timeout_s: float) -> int:
        """Drain, then stop listening; return how many requests still ran when the time was over.

        Readiness ends at once. New requests get DRAINING, and running ones have `timeout_s` to finish. The port stays
        open meanwhile, so that health checks and refused requests are answered.
        """
        if self._grpc is None:
            return 0
        server, self._grpc = self._grpc, None
        self._health.withdraw()
        num_left = await self._frontend.drain(timeout_s)
        self._health.close()
        self._orca.close()
        await server.stop(CLOSING_S)
        for watch in self._watches:
            watch.cancel()
        return num_left

    def _build(self, reuse_port: bool) -> grpc.aio.Server:
        options = (*transport_options(self._config.max_message_size, reuse_port), *age_options(self._config))
        server = grpc.aio.server(interceptors=(self._guard,), options=options)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self._frontend), server)
        others = self._services
        reflected = reflection.handlers(_SERVICES, self._reflecting, others.names, others.files)
        server.add_generic_rpc_handlers(
            (self._health.handler(), self._orca.handler(), *reflected, *self._answering.handlers())
        )
        return server

    def _bind_all(self, server: grpc.aio.Server, listen: Sequence[str], reuse_port: bool) -> tuple[str, ...]:
        credentials = self._certificates.credentials() if self._certificates else None
        return tuple(
            addresses.bind(server, address, reuse_port=reuse_port, credentials=credentials) for address in listen
        )


def age_options(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    """Return gRPC's options for connection ages. Without an age connections stay; without a grace calls finish."""
    ages = (
        ("grpc.max_connection_age_ms", config.max_connection_age),
        ("grpc.max_connection_age_grace_ms", config.max_connection_age_grace),
    )
    return tuple((name, round(age_s * 1000)) for name, age_s in ages if age_s is not None)


def transport_options(max_message_bytes: int, reuse_port: bool) -> tuple[tuple[str, Any], ...]:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # The probe makes windows of megabytes, which unread calls would hold. A message that is read gets a window of
        # its size anyway.
        ("grpc.http2.bdp_probe", 0),
        # By default it is on: a second server would bind the same port and take half of the connections.
        ("grpc.so_reuseport", int(reuse_port)),
        # Both limits are equal: between two limits gRPC refuses at random, by default from 8 KiB.
        ("grpc.max_metadata_size", metadata.MAX_BYTES),
        ("grpc.absolute_max_metadata_size", metadata.MAX_BYTES),
        ("grpc.http2.settings_timeout", _SETTINGS_TIMEOUT_MS),
        # Connections take turns after each call instead of 32, so that refuse_oversized closes one before thousands of
        # its calls are parsed. The number of streams has no limit: one below all slots and the queue would make callers
        # wait silently in their client, and one above would stop no attack.
        ("grpc.http2.max_requests_per_read", 1),
        # By default gRPC cancels calls at random and without a reason above 1,000 that Python has not seen. QUEUE_FULL
        # gives a reason.
        ("grpc.server.max_pending_requests", _MAX_UNSEEN_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_UNSEEN_CALLS),
        # Notices a client that vanished silently within 18 s, even while it only waits.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 8_000),
        ("grpc.http2.ping_timeout_ms", 8_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Allows clients the same interval; otherwise a long silent call ends with "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
    )
