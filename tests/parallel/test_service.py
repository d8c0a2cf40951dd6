"""`serve --tensor-parallel-size`: the answers of one process, and what becomes of the others when one ends."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
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
def service() -> Iterator[RunningService]:
    with serving("--tensor-parallel-size", "2") as running:
        running.wait_ready()
        yield running


def test_two_ranks_answer_as_one_process_and_start_again_when_one_is_killed(service: RunningService) -> None:
    with LLM(device="cpu") as llm:
        expected = [[output.token_ids for output in llm.generate(PROMPTS, **asked)] for asked in ASKED]
    address = service.wait_ready()[0]
    with SyncClient(address) as client:

        def answers() -> list[list[tuple[int, ...]]]:
            return [
                [
                    tuple(output.token_ids)
                    for prompt in PROMPTS
                    for output in client.generate(prompt, token_ids=True, **asked).outputs
                ]
                for asked in ASKED
            ]

        assert "2 ranks" in client.model().numerics["device"]
        assert answers() == expected
        engine, (rank,) = service.children()["engine"], rank_pids(service)
        assert listening([engine, rank]) <= {"0100007F"}, "gloo listens elsewhere than on the loopback interface"
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: not is_alive(engine), "the end of the engine")
        service.wait_ready(times=2)
        assert answers() == expected
        assert rank not in rank_pids(service)


def test_a_rank_that_stands_still_ends_the_engine(service: RunningService) -> None:
    times = len(service.ready_lines())
    engine, (rank,) = service.children()["engine"], rank_pids(service)
    os.kill(rank, signal.SIGSTOP)
    wait_until(lambda: not is_alive(engine) and not is_alive(rank), "the end of both")
    service.wait_ready(times=times + 1)


def test_ranks_end_with_the_engine_and_with_the_service(service: RunningService) -> None:
    times = len(service.ready_lines())
    engine, (rank,) = service.children()["engine"], rank_pids(service)
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: not is_alive(rank), "the end of the rank")
    service.wait_ready(times=times + 1)
    (rank,) = rank_pids(service)
    assert service.end() == 0
    wait_until(lambda: not is_alive(rank), "the end of the rank")
