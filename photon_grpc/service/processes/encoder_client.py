"""A front end's side of its encoder process: the choice of jobs for it, their order and their cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TypeVar

from photon_grpc.bridge.codec import FrameReader, encode
from photon_grpc.bridge.control import Begin, Link
from photon_grpc.core.ask import ChatInput, ConstraintAsk, IdsInput, TextInput
from photon_grpc.core.constraint import Constraint
from photon_grpc.errors import EngineRestarting
from photon_grpc.frontend import encoder_jobs as jobs
from photon_grpc.frontend.encoder import WAITING, AnyInput, ThreadEncoder
from photon_grpc.frontend.fair_turns import FairTurns
from photon_grpc.frontend.input.chat_json import json_fields, texts_of
from photon_grpc.frontend.input.size import are_few, is_small
from photon_grpc.service.processes.child import Child, ChildCommand
from photon_grpc.service.processes.encoder import SMALL_JOB_BYTES, max_memory_bytes
from photon_grpc.service.processes.managed_process import ManagedProcess

log = logging.getLogger(__name__)

A = TypeVar("A", jobs.Ids, jobs.Text, jobs.Grammar)

_MODULE = "photon_grpc.service.processes.encoder"
_MAX_JOBS = 256
#: Bytes of waiting jobs in the front end's memory.
_MAX_JOBS_BYTES = 2**27
#: Far above the ids of a long context, which take four bytes each.
_MAX_ANSWER_BYTES = 2**28
#: Far above the time that a job's processor time takes beside others: a process silent for longer is stopped or hangs.
_MAX_SILENCE_S = 60.0
#: A job without work, which a live process answers.
_NOTHING = jobs.DecodeIds(b"", False)


class EncoderProcess:
    """An encoder that handles small inputs in threads, others in a process that can be killed."""

    def __init__(self, threads: ThreadEncoder, begin: Begin) -> None:
        self._threads = threads
        self._begin = begin
        self._is_up = asyncio.Event()
        self._process = ManagedProcess(
            ChildCommand("encoder", _MODULE),
            on_start=self._started,
            on_message=lambda message: None,
            on_end=lambda child: self._is_up.clear(),
        )
        # Its end, even at the start, fails its current jobs and not the front end.
        self._process.has_worked = True
        self._turns = FairTurns(
            max(1, min((os.cpu_count() or 1) // 2, 4)),
            WAITING,
            max_jobs=_MAX_JOBS,
            max_bytes=_MAX_JOBS_BYTES,
            large_bytes=SMALL_JOB_BYTES,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EncoderProcess]:
        """Keep the process alive within the block. Call it in the main thread."""
        keeper = asyncio.create_task(self._process.keep())
        try:
            yield self
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            if self.child is not None:
                self.child.kill()
                self.child.close()

    async def encode(self, input: AnyInput, max_tokens: int, caller: str = "") -> tuple[int, ...]:
        if isinstance(input, IdsInput) or is_small(input):
            return await self._threads.encode(input, max_tokens, caller)
        job = jobs.EncodeText(input, max_tokens) if isinstance(input, TextInput) else jobs.EncodeChat(input, max_tokens)
        answer = await self._perform(job, sum(map(sys.getsizeof, _texts(input))), caller, jobs.Ids)
        return jobs.unpacked(answer.token_ids)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, caller: str = "") -> str:
        if are_few(token_ids):
            return await self._threads.decode(token_ids, skip_special_tokens, caller)
        job = jobs.DecodeIds(jobs.packed(token_ids), skip_special_tokens)
        return (await self._perform(job, len(job.token_ids), caller, jobs.Text)).text

    async def try_out(self, constraint: ConstraintAsk, caller: str = "") -> Constraint:
        num_bytes = sum(map(sys.getsizeof, (constraint.text, *constraint.choices)))
        return (await self._perform(jobs.TryConstraint(constraint), num_bytes, caller, jobs.Grammar)).constraint

    async def _perform(self, job: jobs.Job, num_bytes: int, caller: str, kind: type[A]) -> A:
        """Have the process do the job; return its answer, of this kind. Cancellation ends the work. Raise PhotonError.

        `num_bytes` are those of the job in memory.
        """
        async with self._turns.turn(caller, num_bytes):
            await self._is_up.wait()
            child = self.child
            if child is None:
                raise RuntimeError("the encoder is marked as running, but there is no process")
            try:
                async with asyncio.timeout(_MAX_SILENCE_S):
                    answer, num_sent = await _request(child, job)
                    if answer is None:
                        await _check_alive(child)
            except TimeoutError:
                child.kill()
                raise _restarting() from None
            if answer is None:
                limit = max_memory_bytes(num_sent) >> 20
                others = ", nests too deeply or breaks the compiler" if isinstance(job, jobs.TryConstraint) else ""
                raise jobs.excess(job, f"takes more than {limit} MiB{others}", limit)
        if isinstance(answer, jobs.Refusal):
            if answer.frames:
                log.error("encoding failed, %s", answer.frames)
            raise answer.fault.error()
        if not isinstance(answer, kind):
            raise RuntimeError(f"an encoder answered with {type(answer).__name__}")
        return answer

    @property
    def child(self) -> Child | None:
        return self._process.child

    def _started(self) -> None:
        if self.child is not None:
            self.child.send(self._begin)
            self._is_up.set()


async def _request(child: Child, job: jobs.Job) -> tuple[jobs.Answer | None, int]:
    """Send the job over a new socket; return the answer, None if the socket closed without one, and the bytes sent."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            child.send(Link(), theirs)
        frame = encode(job)
        num_sent = len(frame)
        reader = FrameReader(jobs.ANSWER, max_bytes=_MAX_ANSWER_BYTES)
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(ours, frame)
            del frame  # megabytes, perhaps
            while received := await loop.sock_recv_into(ours, reader.room()):
                for answer in reader.advance(received):
                    return answer, num_sent
    return None, num_sent


async def _check_alive(child: Child) -> None:
    """Raise EngineRestarting if the whole process has ended, so that another job has no answer either.

    The end of the process is noticed later than that of its sockets.
    """
    answer, _ = await _request(child, _NOTHING)
    if answer is None:
        raise _restarting()


def _restarting() -> EngineRestarting:
    return EngineRestarting("the encoder is restarting; nothing was sent yet")


def _texts(input: TextInput | ChatInput) -> Iterator[str]:
    if isinstance(input, TextInput):
        yield input.text
        return
    yield from texts_of(input)
    yield from [text for _, text in json_fields(input)]
