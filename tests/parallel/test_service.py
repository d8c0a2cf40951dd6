"""`serve --tensor-parallel-size`: the answers of one process, and what becomes of the others when one ends."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from photon_grpc import LLM
from photon_grpc.client import SyncClient
from tests.service.running import RunningService, is_alive, serving, wait_until

PROMPTS = ["def fib(n):\n    ", "import os\n", "class Stack:\n    def push(self, item):\n"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ASKED = [
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_tokens": 16, "num_outputs": 2},
    {"temperature": 0.0, "json_schema": SCHEMA, "max_tokens": 24},
]


def child_pids(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def rank_pids(service: RunningService) -> list[int]:
    return [pid for pid in child_pids(service.children()["engine"]) if is_alive(pid)]


def wait_until_gone(*pids: int) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


def sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
            found.add(match[1])
    return found


def listening(pids: list[int]) -> set[str]:
    """Return the addresses, in hex, at which the processes listen."""
    inodes = set().union(*map(sockets, pids))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].rpartition(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[int, ...]]]:
    """What one process answers."""
    with LLM(device="cpu") as llm:
        return [[output.token_ids for output in llm.generate(PROMPTS, **asked)] for asked in ASKED]


def answers(address: str) -> list[list[tuple[int, ...]]]:
    with SyncClient(address) as client:
        assert "2 ranks" in client.model().numerics["device"]
        return [
            [
                tuple(output.token_ids)
                for prompt in PROMPTS
                for output in client.generate(prompt, token_ids=True, **asked).outputs
            ]
            for asked in ASKED
        ]


def test_two_ranks_answer_as_one_process_and_the_engine_ends_with_one(expected: list[list[tuple[int, ...]]]) -> None:
    with serving("--tensor-parallel-size", "2") as service:
        address = service.wait_ready()[0]
        assert answers(address) == expected
        engine, (rank,) = service.children()["engine"], rank_pids(service)
        assert listening([engine, rank]) <= {"0100007F"}, "gloo listens elsewhere than on the loopback interface"
        with SyncClient(address) as client:
            next(iter(client.stream("def f", max_tokens=1000, ignore_eos=True)))
            os.kill(rank, signal.SIGKILL)
            wait_until_gone(engine)
        # Of a signal no request is suspected.
        wait_until(lambda: any("the engine was killed by SIGKILL" in line for line in service.lines), "the cause")
        service.end()
    assert any("rank 1 has ended by SIGKILL" in line for line in service.lines)


@pytest.mark.full
def test_the_engine_starts_again_whatever_becomes_of_ranks(expected: list[list[tuple[int, ...]]]) -> None:
    with serving("--tensor-parallel-size", "2") as service:
        address = service.wait_ready()[0]
        for times, (name, signum) in enumerate(
            [("rank", signal.SIGKILL), ("rank", signal.SIGSTOP), ("engine", signal.SIGKILL)], 2
        ):
            pids = {"engine": service.children()["engine"], "rank": rank_pids(service)[0]}
            os.kill(pids[name], signum)
            wait_until_gone(*pids.values())
            service.wait_ready(times=times)
        assert answers(address) == expected
        (rank,) = rank_pids(service)
        assert service.end() == 0
        wait_until_gone(rank)


@pytest.mark.full
@pytest.mark.parametrize("delay_s", [0.1, 2.0, 3.0, 4.0])
def test_a_rank_that_ends_while_it_starts_is_named(delay_s: float) -> None:
    with serving("--tensor-parallel-size", "2") as service:
        wait_until(lambda: "engine" in service.children() and rank_pids(service), "a rank")
        engine, (rank,) = service.children()["engine"], rank_pids(service)
        time.sleep(delay_s)
        os.kill(rank, signal.SIGKILL)
        wait_until_gone(engine)
        if not service.ready_lines():
            assert service.process.wait() == 2
            assert "rank 1 has ended by SIGKILL while it started" in service.lines[-1]
        service.end()
