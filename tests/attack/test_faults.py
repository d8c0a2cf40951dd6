"""Processes that are killed, stopped, or stopped for a while in the middle of streams: who was served is told, who
comes next is served."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import grpc
import pytest

from photon_grpc.client.channel import channel_options
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.attack.answers import Answer, answer, strangers, tally, together
from tests.attack.figures import Figures
from tests.attack.size import Size
from tests.attack.victim import FLAGS, Victim, num_descriptors, victim
from tests.service.running import SERVING, client, serving

#: Until the service answers rightly again: a new process is started, perhaps after a pause, on a busy machine.
_RECOVERY_LIMIT_S = 90.0
#: Until a call has ended that a stopped process held: seen by a heartbeat, or by the keepalive of the caller.
_ANSWER_LIMIT_S = 75.0
_NUM_STREAMS = 24
_UNTIL_OTHERS_WAIT_S = 0.1
#: Longer than a process may be silent, shorter than gRPC waits for an answer to a ping.
_PAUSE_S = 6.5

KILLED = [pytest.param(role, signal.SIGKILL, id=f"{role} killed") for role in ("engine", "frontend")]
STOPPED = [
    pytest.param(role, signal.SIGSTOP, id=f"{role} stopped", marks=pytest.mark.long_attack)
    for role in ("engine", "frontend")
]


@pytest.mark.parametrize(("role", "signum"), KILLED + STOPPED)
async def test_a_process_is_lost_while_it_serves(
    attacked: Victim, size: Size, figures: Figures, role: str, signum: signal.Signals
) -> None:
    found: list[Answer] = []
    recoveries_s = []
    for _ in range(size.kills if signum is signal.SIGKILL else 1):
        before = attacked.pids()
        async with speaking_streams(attacked.address) as streams:
            os.kill(before[role], signum)
            faulted_s = time.monotonic()
            found += await together(map(answer, streams.calls))
        if role == "engine":
            with client(attacked.address) as call:
                assert call.health("") == SERVING
        recoveries_s.append(recovered_s(attacked) - faulted_s)
        after = attacked.pids()
        assert {other for other in before if before[other] != after[other]} == {role}
    attacked.owns_nothing()
    name = f"{role} {'killed' if signum is signal.SIGKILL else 'stopped'}"
    slowest_s = max(answer.seconds for answer in found)
    told = ", ".join(f"{seconds:.1f}" for seconds in recoveries_s)
    figures.add(
        name,
        f"{len(recoveries_s)} ×, {_NUM_STREAMS} streams each",
        tally(found),
        recovery=f"{told}; calls ended within {slowest_s:.1f}",
    )
    # A caller of a front end that is gone hears it from its own gRPC.
    assert strangers(found, "UNAVAILABLE") == []
    assert {answer.code for answer in found} <= {"OK", "UNAVAILABLE"}
    assert "UNAVAILABLE" in {answer.code for answer in found}


@pytest.mark.long_attack
async def test_everything_pauses_for_a_while(attacked: Victim, figures: Figures) -> None:
    """As a container that is paused: nothing is lost, nobody is replaced."""
    with attacked.unharmed():
        everybody = [attacked.service.process.pid, *attacked.pids().values()]
        async with speaking_streams(attacked.address) as streams:
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                for pid in everybody:
                    os.kill(pid, signum)
                await asyncio.sleep(_PAUSE_S if signum is signal.SIGSTOP else 0)
            found = await together(map(answer, streams.calls))
    figures.add("everything paused", f"{_PAUSE_S:g} s, {_NUM_STREAMS} streams", tally(found))
    assert set(tally(found)) == {"OK"}


class speaking_streams:  # a context, named as what it gives
    """Streams to the end of the context, more than there are slots: one speaks, some compute, the others wait."""

    def __init__(self, address: str) -> None:
        # As our clients connect, who notice a server that fell silent; no call is tried again.
        self._channel = grpc.aio.insecure_channel(address, channel_options(address, retries=0))
        self.calls: list[grpc.aio.UnaryStreamCall] = []

    async def __aenter__(self) -> speaking_streams:
        request = pb.GenerateRequest(text="def", stop=pb.StopParams(ignore_eos=True))
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self.calls = [stub.StreamGenerate(request, timeout=_ANSWER_LIMIT_S)]
        await self.calls[0].read()
        self.calls += [stub.StreamGenerate(request, timeout=_ANSWER_LIMIT_S) for _ in range(1, _NUM_STREAMS)]
        await asyncio.sleep(_UNTIL_OTHERS_WAIT_S)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()


def recovered_s(attacked: Victim) -> float:
    """When it answered rightly again."""
    limit_s = time.monotonic() + _RECOVERY_LIMIT_S
    while time.monotonic() < limit_s:
        try:
            if attacked.says_what_it_said():
                return time.monotonic()
        except grpc.RpcError:
            time.sleep(0.1)
    raise TimeoutError(attacked.complaint())


@pytest.mark.long_attack
def test_more_connections_than_descriptors(size: Size, figures: Figures) -> None:
    """Further ones wait or are refused; who is connected is served, and all are once the others have left."""
    from tests.attack.http2 import Connection

    with victim("--model", size.model, limit_descriptors=96) as running, running.unharmed():
        with client(running.address) as known:
            known.generate()
            crowd = [Connection(running.address) for _ in range(200)]
            time.sleep(1)
            known.generate()
            full = num_descriptors(running.pids()["frontend"])
            for connection in crowd:
                connection.vanish()
        left_s = time.monotonic()
        recovery = f"{recovered_s(running) - left_s:.1f}"
    figures.add("few descriptors", f"200 connections, {full} open at most", "served", recovery=recovery)


@pytest.mark.long_attack
def test_many_front_ends(figures: Figures, size: Size) -> None:
    """One of them dies again and again; all share the engine."""
    with serving(*FLAGS, "--model", size.model, "--frontends", "6") as service:
        address = service.wait_ready()[0]
        for times in range(2, 2 + size.kills):
            os.kill(service.children()["frontend"], signal.SIGKILL)
            service.wait_ready(times)
            with client(address) as call:
                assert call.generate().usage.output_tokens == 4
        assert len(service.pids()) == 7
        assert service.end() == 0
    figures.add("many front ends", f"6, {size.kills} × one killed", "served")
