"""`serve` on two GPUs: the answers of one, and a new engine after a rank has been killed."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from photon_grpc.client import SyncClient
from tests.parallel.test_service import rank_pids, wait_until_gone
from tests.service.running import WITH_MODEL, started

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPTS = ["def fib(n):\n    ", "import os\n", "class Stack:\n    def push(self, item):\n"]
SERVE = [*WITH_MODEL, "serve", "--listen", "127.0.0.1:0", "--num-blocks", "200", "--max-num-seqs", "8"]


def answers(address: str) -> list[list[int]]:
    with SyncClient(address) as client:
        asked = {"temperature": 0.0, "max_tokens": 24, "num_outputs": 2, "token_ids": True}
        return [list(output.token_ids) for text in PROMPTS for output in client.generate(text, **asked).outputs]


def test_two_gpus_answer_as_one_and_go_on_after_a_rank_was_killed() -> None:
    flags = ["--dtype", "float32"]
    with started([*SERVE, *flags]) as one, started([*SERVE, *flags, "--tensor-parallel-size", "2"]) as two:
        try:
            expected = answers(one.wait_ready()[0])
            assert answers(two.wait_ready()[0]) == expected
            engine, (rank,) = two.children()["engine"], rank_pids(two)
            os.kill(rank, signal.SIGKILL)
            wait_until_gone(engine, rank)
            assert answers(two.wait_ready(times=2)[0]) == expected
            assert one.end() == two.end() == 0
        finally:
            print(*two.lines, sep="\n")
