"""One client process of a load, to which `load.py` sends the requests and their times on stdin.

It uses the stubs instead of the client library, so that a message costs it only 40 µs and the server is what is
measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import grpc
import grpc.aio

from photon_grpc.cli.load.load import RequestResult, Session, Turn, Workload, as_json
from photon_grpc.cli.terminal.connection import key_metadata, tls_credentials
from photon_grpc.client.channel import open_channel
from photon_grpc.client.multiplex import Multiplex
from photon_grpc.client.newer_fields import NewerFields
from photon_grpc.client.resume import ResumingCall
from photon_grpc.client.retry_policy import RetryPolicy
from photon_grpc.client.status import to_error
from photon_grpc.errors import PhotonError
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

_CONNECT_TIMEOUT_S = 30.0
#: Failures are counted; only what met the end of an idle stream on its way is sent again.
_POLICY = RetryPolicy(max_retries=0, resumes=False)


def read_load(text: str) -> Workload:
    workload = json.loads(text)
    sessions = [
        Session([Turn(**turn) for turn in session["turns"]], session["start_s"], session["keeps_history"])
        for session in workload["sessions"]
    ]
    return Workload(**workload | {"sessions": sessions})


class TurnResult(NamedTuple):
    """The times of one request and its messages, its tokens, and a failure if there was one."""

    sent_s: float
    times_s: list[float]
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    reason: str = ""
    message: str = ""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


#: Sends a turn and reads its answer; the history, if there is one, gets the ids of both.
Ask = Callable[[Turn, list[int] | None], Awaitable[TurnResult]]
#: Connects, and closes what it opened.
Connect = Callable[[Workload], AbstractAsyncContextManager[Ask]]


class LoadClient:
    """The sessions of a load, played over one connection."""

    def __init__(self, load: Workload, ask: Ask) -> None:
        self._load = load
        self._ask = ask
        self._waiting = enumerate(load.sessions)
        self._zero_s = 0.0

    async def play(self, start_at_s: float) -> None:
        """Play all sessions."""
        self._zero_s = time.perf_counter() + start_at_s - time.time()
        places = self._load.concurrency or len(self._load.sessions)
        await asyncio.gather(*(self._place() for _ in range(places)))

    async def _place(self) -> None:
        """Play one session after another, in their order, each at its time or later."""
        for number, session in self._waiting:
            await asyncio.sleep(max(0.0, self._zero_s + session.start_s - time.perf_counter()))
            await self._session(number, session)

    async def _session(self, number: int, session: Session) -> None:
        history: list[int] | None = [] if session.keeps_history else None
        for index, turn in enumerate(session.turns):
            planned_s = session.start_s if index == 0 and self._load.concurrency is None else None
            answer = self._result(await self._ask(turn, history), (number, index), planned_s)
            say(json.dumps(answer, default=as_json))
            if history is not None and answer.reason:
                return

    def _result(self, found: TurnResult, turn: tuple[int, int], planned_s: float | None) -> RequestResult:
        sent_s, times = found.sent_s - self._zero_s, found.times_s
        return RequestResult(
            *turn,
            sent_s=sent_s,
            late_s=0.0 if planned_s is None else max(0.0, sent_s - planned_s),
            first_s=times[0] - found.sent_s if times else None,
            gaps_s=[round(after - before, 7) for before, after in pairwise(times)],
            total_s=time.perf_counter() - found.sent_s,
            prompt_tokens=found.prompt_tokens,
            cached_prompt_tokens=found.cached_prompt_tokens,
            output_tokens=found.output_tokens,
            reason=found.reason,
            message=found.message,
            draft_tokens=found.draft_tokens,
            accepted_draft_tokens=found.accepted_draft_tokens,
        )


class GrpcCalls:
    """The requests of a load as calls over one channel."""

    def __init__(self, load: Workload, channel: grpc.aio.Channel) -> None:
        self._load = load
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self.multiplex = None
        if load.multiplex:
            models = model_pb2_grpc.ModelServiceStub(channel)
            self.multiplex = Multiplex(
                lambda: self._stub.MultiplexGenerate(metadata=key_metadata()),
                load.target,
                _POLICY,
                NewerFields(lambda: models.GetModel(model_pb2.GetModelRequest(), metadata=key_metadata()), load.target),
            )

    async def ask(self, turn: Turn, history: list[int] | None) -> TurnResult:
        times: list[float] = []
        usage, failure = inference_pb2.Usage(), ("", "")
        request = self._request(turn, history)
        sent = time.perf_counter()
        try:
            async for message in self._call(request):
                times.append(time.perf_counter())
                if history is not None:
                    for delta in message.deltas:
                        history.extend(delta.token_ids)
                if message.HasField("usage"):
                    usage = message.usage
        except grpc.aio.AioRpcError as error:
            problem = to_error(error, self._load.target)
            failure = (problem.reason, str(problem))
        except PhotonError as problem:
            failure = (problem.reason, str(problem))
        tokens = usage.prompt_tokens, usage.cached_prompt_tokens, usage.output_tokens
        return TurnResult(sent, times, *tokens, *failure, usage.draft_tokens, usage.accepted_draft_tokens)

    def _request(self, turn: Turn, history: list[int] | None) -> inference_pb2.GenerateRequest:
        load, request = self._load, inference_pb2.GenerateRequest(model=self._load.model)
        if isinstance(turn.prompt, str):
            request.text = turn.prompt
        elif history is None:
            request.token_ids.ids.extend(turn.prompt)
        else:
            history.extend(turn.prompt)
            request.token_ids.ids.extend(history)
            request.output.token_ids = True
        request.sampling.temperature = 0.0
        request.stop.max_tokens = turn.output_tokens
        request.stop.ignore_eos = True
        request.cache.salt = load.salt
        request.cache.bypass_prefix_cache = load.bypass_prefix_cache
        if load.logprobs is not None:
            request.output.logprobs = load.logprobs
        if load.speculation is not None:
            request.scheduling.speculation = load.speculation
        if not load.text:
            request.output.text = False
            request.output.token_ids = True
        return request

    def _call(self, request: inference_pb2.GenerateRequest) -> AsyncIterable[inference_pb2.StreamGenerateResponse]:
        timeout_s = self._load.timeout_s
        if self.multiplex is None:
            return self._stub.StreamGenerate(request, timeout=timeout_s, metadata=key_metadata())
        return _messages(ResumingCall(request, self.multiplex.ask, self._load.target, timeout_s, _POLICY))


async def _messages(call: ResumingCall) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message
    finally:
        call.cancel()


@contextlib.asynccontextmanager
async def over_grpc(load: Workload) -> AsyncIterator[Ask]:
    """Connect to the server of a load."""
    async with open_channel(load.target, credentials=tls_credentials(), retries=0) as channel:
        # If there is no server, every request fails with the reason.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(channel.channel_ready(), _CONNECT_TIMEOUT_S)
        calls = GrpcCalls(load, channel)
        async with calls.multiplex or contextlib.nullcontext():
            yield calls.ask


def main(connect: Connect) -> None:
    """Run this process: read its load and the time to start from stdin, and write what came of it."""
    with _runner() as runner:
        runner.run(_run(connect))


async def _run(connect: Connect) -> None:
    load = read_load(sys.stdin.readline())
    async with connect(load) as ask:
        client = LoadClient(load, ask)
        gc.collect()
        gc.freeze()
        say("ready")
        start_at_s = json.loads(await asyncio.to_thread(sys.stdin.readline))
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        await client.play(start_at_s)
    say("done")


def say(line: str) -> None:
    print(line, flush=True)


def _exit_with_parent() -> None:
    """Exit when the parent's end of stdin closes, as it does if the parent dies."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _runner() -> Any:
    """Return a runner on uvloop if it is installed, which costs less per message."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    main(over_grpc)
