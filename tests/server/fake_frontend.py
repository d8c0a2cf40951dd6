"""A front end without an engine, which answers as a test scripts and records its requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.ask import Ask, ChatInput, ConstraintAsk, Origin, SamplingAsk, TextInput
from photon_grpc.core.frames import Reply, Suspect
from photon_grpc.core.generation import Start, Timing, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.core.stats import Load
from photon_grpc.errors import Draining, ModelNotFound
from photon_grpc.frontend.frontend import WriteConstraint
from photon_grpc.frontend.model import ModelFacts, RequestLimits
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish, Result, Update
from photon_grpc.frontend.readiness import State
from photon_grpc.server.server import Server
from photon_grpc.v1 import inference_pb2 as pb
from tests.frontend.fake_engine import FACTS

LIMITS = RequestLimits(
    max_num_outputs=8,
    max_logprobs=20,
    max_stop_strings=64,
    max_stop_string_bytes=1024,
    max_logit_bias=1024,
    max_constraint_bytes=1 << 20,
    max_message_bytes=1 << 25,
)
LAST = Update(
    (OutputDelta(0, "!", finish=OutputFinish(FinishReason.EOS, eos_token_id=2)),),
    Usage(3, 1, 3),
    Timing(0.25, 0.5, 1.5, 2),
)
HELLO = (Update((OutputDelta(0, "hel"),)), Update((OutputDelta(0, "lo"),)), LAST)


def facts(name: str, *, aliases: tuple[str, ...] = ()) -> ModelFacts:
    return ModelFacts(
        name=name,
        aliases=aliases,
        max_context_tokens=4096,
        vocab_size=100,
        eos_token_ids=(2, 3),
        default_sampling=SamplingAsk(temperature=0.5, top_k=40),
        features=("TEXT", "CHAT", "NUM_OUTPUTS"),
        limits=LIMITS,
        revision="abc",
        dtype="float32",
        quantization="",
    )


class FakeStream:
    """A stream that yields the updates of `script`, raises its exceptions and awaits what its callables return."""

    def __init__(self, ask: Ask, script: Sequence[Any]) -> None:
        self.start = start_of(ask)
        self.closed = asyncio.Event()
        self._script = iter(script)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Update:
        for item in self._script:
            if isinstance(item, Update):
                return item
            if isinstance(item, Exception):
                raise item
            await item()
        raise StopAsyncIteration

    #: For a multiplexed stream, with a script of updates.
    num_running = 1

    def take(self) -> Update | None:
        return next(self._script, None)

    def call_when_due(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def close(self, error: BaseException | None = None) -> None:
        self.closed.set()

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


def start_of(ask: Ask) -> Start:
    prompt = (5, 6) if ask.output.prompt_token_ids else ()
    return Start(ask.origin.request_id, ask.model or "demo", ask.sampling.seed or 7, 1_700_000_000.25, prompt)


async def for_ever() -> None:
    await asyncio.Event().wait()


class FakeFrontend:
    def __init__(self) -> None:
        self.state = State.SERVING
        self.asks: list[Ask] = []
        self.streams: list[FakeStream] = []
        #: The updates of every stream, after which `generate` returns its result.
        self.script: Sequence[Any] = HELLO
        #: Raised by the next calls, one each, before anything else happens.
        self.refusals: list[Exception] = []
        self.served = (facts("demo", aliases=("default",)), facts("other"), facts("third"))
        #: The constraints of typed outputs.
        self.written: list[ConstraintAsk] = []
        self.tokenized: list[tuple[str, TextInput | ChatInput]] = []
        self.drained_for_s: list[float] = []
        self.load = Load()
        self.numerics_version = ""
        self.facts = FACTS
        #: Requests that never became an Ask, and why.
        self.refused_requests: list[tuple[Origin, BaseException]] = []
        self.orders: list[tuple[str, tuple[str, ...]]] = []
        self.suspects: tuple[Suspect, ...] = ()
        self._listeners: list[Callable[[State], None]] = []

    def on_state(self, callback: Callable[[State], None]) -> None:
        self._listeners.append(callback)

    def become(self, state: State) -> None:
        self.state = state
        for callback in self._listeners:
            callback(state)

    async def stream(self, ask: Ask, write: WriteConstraint | None = None) -> FakeStream:
        await self._admit(ask, write)
        self.streams.append(FakeStream(ask, self.script))
        return self.streams[-1]

    async def generate(self, ask: Ask, write: WriteConstraint | None = None) -> Result:
        await self._admit(ask, write)
        stream = FakeStream(ask, self.script)
        self.streams.append(stream)
        text, last = "", LAST
        try:
            async for last in stream:
                text += last.deltas[0].text
        finally:
            stream.close()
        finish = last.deltas[0].finish or LAST.deltas[0].finish
        return Result(stream.start, (OutputDelta(0, text, (1, 2), finish),), LAST.usage, LAST.timing)

    def refused(self, origin: Origin, error: BaseException) -> None:
        self.refused_requests.append((origin, error))

    async def tokenize(self, model: str, input: TextInput | ChatInput, caller: str = "") -> tuple[int, ...]:
        self.tokenized.append((model, input))
        return (1, 2, 3)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], skip_special_tokens: bool, caller: str = ""
    ) -> str:
        return f"{model}:{list(token_ids)}:{skip_special_tokens}"

    def model(self, name: str) -> ModelFacts:
        for served in self.served:
            if name in ("", served.name, *served.aliases):
                return served
        raise ModelNotFound("no such model", field="model")

    def models(self) -> tuple[ModelFacts, ...]:
        return self.served

    async def control(self, verb: str, names: tuple[str, ...] = ()) -> Reply:
        self.orders.append((verb, names))
        if self.refusals:
            raise self.refusals.pop(0)
        return Reply(1, 42, names or ("a", "b"), self.suspects)

    async def drain(self, timeout_s: float) -> int:
        self.drained_for_s.append(timeout_s)
        self.become(State.DRAINING)
        running = [asyncio.create_task(stream.closed.wait()) for stream in self.streams]
        if not running:
            return 0
        _, pending = await asyncio.wait(running, timeout=timeout_s)
        return len(pending)

    async def _admit(self, ask: Ask, write: WriteConstraint | None) -> None:
        self.asks.append(ask)
        if self.refusals:
            raise self.refusals.pop(0)
        if self.state is State.DRAINING:
            raise Draining("the server is stopping", retry_after_s=1.0)
        if write is not None:
            self.written.append(await write())


@asynccontextmanager
async def serving(frontend: FakeFrontend, **options: Any) -> AsyncIterator[str]:
    """Run a server on a free port, and yield its address."""
    config = options.pop("config", ServerConfig())
    server = Server(frontend, config=config, **options)  # type: ignore[arg-type]
    (address,) = await server.start(("127.0.0.1:0",), reuse_port=False)
    try:
        yield address
    finally:
        await server.drain_and_stop(0)


def raw(channel: grpc.aio.Channel, method: str, *, stream: bool = False) -> Any:
    """Return a method that takes and returns bytes."""
    make = channel.unary_stream if stream else channel.unary_unary
    return make(method, request_serializer=None, response_deserializer=None)


async def until(is_true: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait for a condition that another task fulfils; fail if it takes too long."""
    end_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > end_s:
            raise TimeoutError("it did not become true")
        await asyncio.sleep(0.005)


ASK = pb.GenerateRequest(text="hi")
GENERATE = "/photon_grpc.v1.InferenceService/Generate"
STREAM_GENERATE = "/photon_grpc.v1.InferenceService/StreamGenerate"
