"""photon_grpc.v1.InferenceService: messages become Asks, and the front end's results become messages."""

from __future__ import annotations

import asyncio
from functools import partial

from photon_grpc.access.places import Places
from photon_grpc.core.admission import check_request_id
from photon_grpc.core.ask import Ask, Origin
from photon_grpc.errors import Draining, NotAllowed, PhotonError
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.preparation import WriteConstraint
from photon_grpc.frontend.readiness import State
from photon_grpc.server.calls.call import Call, CallFailures, current
from photon_grpc.server.calls.metadata import Context
from photon_grpc.server.calls.receiver import Messages
from photon_grpc.server.heartbeats import begun
from photon_grpc.server.multiplex import Admitted, MultiplexCall
from photon_grpc.server.typed.message_type import MessageTypes, RequestedType
from photon_grpc.server.wire import codec, logprobs, messages
from photon_grpc.server.wire.responses import ResponseWriter
from photon_grpc.server.wire.writer import StreamWriter
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc

#: Open calls; each may hold an arriving message of the largest size.
MAX_MULTIPLEX_CALLS = 64
_MULTIPLEX = "MultiplexGenerate"


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The service's methods. They raise errors; the Guard turns those into a status for all services."""

    def __init__(self, frontend: Frontend, writer: StreamWriter, failures: CallFailures) -> None:
        self._frontend = frontend
        self._writer = writer
        self._failures = failures
        self.places = Places("calls of MultiplexGenerate", MAX_MULTIPLEX_CALLS, oldest_first=False)
        self._multiplexed: set[MultiplexCall] = set()
        self._reading: set[asyncio.Task[None]] = set()
        frontend.on_state(self._on_state)
        self._types = MessageTypes()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        ask, typed = self._only_ask("Generate", request)
        del request  # it may hold megabytes for the whole run
        result = await self._frontend.generate(ask, _writer(typed))
        response = codec.generate_response(result)
        if ask.output.is_scored:
            await logprobs.add_to_response(response, result)
        if typed is not None and typed.found is not None:
            await messages.add(response.outputs, result.outputs, typed.found)
        await current().send_initial_metadata(context)
        return response

    async def StreamGenerate(  # type: ignore[override]  # a coroutine that writes: cheaper than a generator
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        ask, typed = self._only_ask("StreamGenerate", request)
        del request  # it may hold megabytes for the whole run
        responses = ResponseWriter()
        admission, interval_s = self._frontend.stream(ask, _writer(typed)), ask.stream.heartbeat_interval_s
        del ask
        if interval_s is not None:
            admission = begun(admission, interval_s, partial(self._beat, context, responses))
        stream = await admission
        responses.message_type = typed.found if typed else None
        # Aborts what still runs when the call is cancelled, times out or loses its connection.
        async with stream:
            async for update in stream:
                message = responses.plain(update) or await responses.full(update, stream.start)
                if responses.sequence == 1:
                    await current().send_initial_metadata(context)
                await self._writer.write(context, message)

    async def _beat(self, context: Context, responses: ResponseWriter) -> None:
        """Write a heartbeat."""
        message = responses.heartbeat()
        if responses.sequence == 1:
            await current().send_initial_metadata(context)
        await self._writer.write(context, message)

    async def MultiplexGenerate(  # type: ignore[override]
        self, request_iterator: Messages, context: Context
    ) -> None:
        self._check_open()
        rpc = current()
        call = MultiplexCall(partial(self._admit, rpc), partial(self._refuse, rpc), self._failures)
        with self.places.take(rpc.caller, call):
            await self._answer(call, request_iterator, context)

    def _check_open(self) -> None:
        """Raise Draining."""
        if self._frontend.state is State.DRAINING:
            raise Draining()

    async def _answer(self, call: MultiplexCall, actions: Messages, context: Context) -> None:
        """Read the actions in a task, and write the answers. Raise Draining, DeadlinePassed, IdleStreamEvicted."""
        self._multiplexed.add(call)
        reading = asyncio.create_task(call.read(actions))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        try:
            await call.answer(context, self._writer)
        finally:
            self._multiplexed.discard(call)
            call.close()

    def _on_state(self, state: State) -> None:
        if state is State.DRAINING:
            for call in self._multiplexed:
                call.drain()

    async def _admit(self, call: Call, request: pb.GenerateRequest) -> Admitted:
        """Start one of many requests, in its own task."""
        origin = call.origin(_MULTIPLEX)
        try:
            call.check_key()
        except NotAllowed as error:
            self._refuse(call, request.request_id, error)
            raise
        ask, typed = self._ask(request, origin, is_retry=call.is_retry)
        del request  # it may hold megabytes while its prompt is prepared
        stream = await self._frontend.stream(ask, _writer(typed))
        return Admitted(stream, typed.found if typed else None)

    def _refuse(self, call: Call, request_id: str, error: PhotonError) -> None:
        """Record the refusal of one of many requests."""
        origin = call.origin(_MULTIPLEX)
        origin.request_id = request_id
        self._frontend.refused(origin, error)

    def _only_ask(self, method: str, request: pb.GenerateRequest) -> tuple[Ask, RequestedType | None]:
        """Return the call's only request, and give the call its id."""
        call = current()
        call.is_request = True
        origin = call.origin(method)
        try:
            return self._ask(request, origin, is_retry=call.is_retry)
        finally:  # a refused call has that id, too
            call.request_id = origin.request_id

    def _ask(self, request: pb.GenerateRequest, origin: Origin, *, is_retry: bool) -> tuple[Ask, RequestedType | None]:
        try:
            if request.request_id:
                check_request_id(request.request_id)
                origin.request_id = request.request_id
            facts = self._frontend.model(request.model)
            origin.model = facts.name
            return codec.ask_of(request, facts, origin, replaces=is_retry), self._typed(request, origin)
        except BaseException as error:
            self._frontend.refused(origin, error)
            raise

    def _typed(self, request: pb.GenerateRequest, origin: Origin) -> RequestedType | None:
        """Return the type of typed output; None if the request has another constraint or none."""
        wanted = request.structured_output
        return self._types.wanted(wanted.protobuf, origin) if wanted.HasField("protobuf") else None


def _writer(typed: RequestedType | None) -> WriteConstraint | None:
    return typed.constraint if typed else None
