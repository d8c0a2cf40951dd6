"""A second runner that is only told what rank 0 decides: it has the same state after every kind of request.

Both runners have the whole model, so that the states can be compared; frames go through a socket, as between processes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from photon_grpc import LLM, demo
from photon_grpc.bridge.codec import encode
from photon_grpc.bridge.ranks import Launch, RankChannel, ReadStep, SharedMasks
from photon_grpc.compose import leading_rank
from photon_grpc.compose.assemble import load_runner
from photon_grpc.compose.following_rank import follow
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import Runner
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.ranks import LeadingRunner, NoRanks
from tests.compose.matrix import FEATURES, answer, request

CROWDED = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 4, "num_blocks": 48}
MIRRORS = (
    "max_computed",
    "unread_drafts",
    "filtered",
    "processed",
    "banned",
    "logprob_params",
    "prompt_logprob_params",
)


class Told(NoRanks):
    """Rank 0 of two, of which the other is a thread here."""

    def __init__(self, config: ServeConfig) -> None:
        ours, theirs = socket.socketpair()
        self.channel = RankChannel(ours)
        self.masks = SharedMasks([self.channel])
        self.first: ModelRunner | None = None
        self.second = load_runner(config, lambda stage, done, total: None).runner
        self.error: BaseException | None = None
        self.taken = threading.Event()
        mask = self.second.table.mask
        self.second.table.mask = lambda masks: (mask(masks), self.taken.set())[0]  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._follow, args=(RankChannel(theirs),))
        self.thread.start()

    def _follow(self, channel: RankChannel) -> None:
        try:
            follow(channel, self.second)
        except EOFError:
            return
        except BaseException as error:
            self.error = error

    def lead(self, runner: ModelRunner) -> Runner:
        self.first = runner
        return LeadingRunner(runner, self)

    def mask_memory(self, device: torch.device) -> Callable[[int], memoryview]:
        return self.masks.allocate

    def launch(self, batch: Batch) -> None:
        self.channel.send_encoded(encode(Launch(batch)))

    def sample(self, masks: memoryview) -> None:
        # Ranks that exchange parts have taken their masks before rank 0 reads the step and fills the next ones.
        self.taken.clear()
        self.channel.send(self.masks.message(masks))
        assert self.taken.wait(60)

    def read(self) -> None:
        self.channel.send(ReadStep())

    def await_report(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.channel.close()
        self.thread.join()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """The ranks of programs that begin in the test."""
    found: list[Told] = []

    def ranks_of(config: ServeConfig) -> Told:
        found.append(Told(config))
        return found[-1]

    monkeypatch.setattr(leading_rank, "ranks_of", ranks_of)
    return found


def check(told: Told) -> None:
    """Compare the states, once the second runner has computed all that it was told."""
    told.close()
    assert told.error is None and told.first is not None
    first, second = told.first.table, told.second.table
    for name in MIRRORS:
        assert getattr(first, name) == getattr(second, name), name
    for name in ("token_ids", "block_table", "counts"):
        assert torch.equal(getattr(first, name)[1:], getattr(second, name)[1:]), name
    for name, one, other in zip(first.numbers._fields, first.numbers, second.numbers, strict=True):
        assert torch.equal(one[1:], other[1:]), name


@pytest.mark.parametrize(
    "drafter",
    ["", pytest.param("ngram", marks=pytest.mark.full), str(demo.DRAFT)],
    ids=["plain", "ngram", "model"],
)
def test_the_second_runner_has_the_state_of_the_first(drafter: str, told: list[Told]) -> None:
    drafts = {"speculative_model": drafter, "speculation_control": "fixed"} if drafter else {}
    with LLM(device="cpu", **drafts, **CROWDED) as llm, ThreadPoolExecutor(len(FEATURES)) as callers:
        list(callers.map(partial(answer, llm), (request((name,)) for name in FEATURES)))
    check(told[0])
