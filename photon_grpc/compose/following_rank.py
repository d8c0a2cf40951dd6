"""A rank beside rank 0: it loads its part of the model and computes what it is told to.

It decides nothing: rank 0 sends every step, and a step that fails here ends all ranks.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from photon_grpc.bridge.ranks import Launch, Minimum, NewMaskMemory, RankChannel, RankValue, ReadStep, SampleMasked
from photon_grpc.compose.assemble import check_parallel, load_runner, pick_device
from photon_grpc.compose.leading_rank import OneRank
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.ports import Pending
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.ranks import refuse_failure


class FollowingRank(OneRank):
    """A rank that exchanges numbers with the others through rank 0."""

    def __init__(self, config: ServeConfig, rank: int, rendezvous: int, channel: RankChannel) -> None:
        super().__init__(rank, config, rendezvous)
        self._config = config
        self._channel = channel

    def load(self) -> ModelRunner:
        """Load the model and compute the warm-up steps with the other ranks. Raise StartupError."""
        device = pick_device(self._config.device.device, self.mesh.world.rank)
        check_parallel(self._config.parallel, device)
        if device.type == "cuda":
            # Triton launches on the current device of the thread.
            torch.cuda.set_device(device)
        runner = load_runner(self._config, lambda stage, done, total: None, self).runner
        gc.collect()
        gc.freeze()
        return runner

    def minimum(self, number: int) -> int:
        self._channel.send(RankValue(number))
        message = self._channel.receive()
        if not isinstance(message, Minimum):
            raise TypeError(f"rank 0 answered {message}")
        return message.number

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """Compute alone, after rank 0 has."""
        self.minimum(0)
        yield


def follow(channel: RankChannel, runner: ModelRunner) -> None:
    """Compute what rank 0 sends. Raise EOFError when it has ended, RankFailure if a step fails."""
    memories: list[memoryview] = []
    unread: deque[Pending] = deque()
    pending: Pending | None = None
    while True:
        message = channel.receive()
        if isinstance(message, Launch):
            pending = runner.submit(message.batch)
            if message.batch.drafts:
                unread.append(pending)
        elif isinstance(message, SampleMasked) and pending is not None:
            pending.sample(memories[message.memory][: message.num_bytes])
        elif isinstance(message, ReadStep):
            unread.popleft().result()
        elif isinstance(message, NewMaskMemory):
            memories.append(channel.take_memory(message.num_bytes))
        else:
            raise TypeError(f"rank 0 sent {message}")
        refuse_failure(runner)
