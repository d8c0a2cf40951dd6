"""The ranks that compute a model together: their agreement at the start, and the steps that rank 0 leads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.ports import Pending, Runner
from photon_grpc.layers.parallel.group import Mesh
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.upload import host_memory


class Ranks(Protocol):
    """This process among the ranks of a model. All ranks make the same calls in the same order."""

    @property
    def mesh(self) -> Mesh: ...

    def minimum(self, number: int) -> int:
        """Return the minimum over all ranks; also a barrier. Raise StartupError if a rank cannot start."""

    def leader_first(self) -> AbstractContextManager[None]:
        """Return a context in which rank 0 computes alone, and then the others, which find all kernels compiled."""

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which this rank computes alone, whatever the others do."""

    def join(self, device: torch.device, hidden_size: int) -> None:
        """Connect to the other ranks: from now on layers exchange their parts."""


class LeadingRanks(Ranks, Protocol):
    """The ranks as rank 0 sees them."""

    def starting(self) -> AbstractContextManager[None]:
        """Return a context that ends the other ranks if it fails; StartupError names the rank that failed first."""

    def lead(self, runner: ModelRunner) -> Runner:
        """Return a runner that runs every step on all ranks."""

    def mask_memory(self, device: torch.device) -> Callable[[int], memoryview]:
        """Return an allocator of memory for masks that all ranks can read."""

    def close(self) -> None:
        """End the other ranks."""


class NoRanks:
    """A process that computes a model alone."""

    mesh = Mesh()

    def minimum(self, number: int) -> int:
        return number

    def leader_first(self) -> AbstractContextManager[None]:
        return nullcontext()

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self, device: torch.device, hidden_size: int) -> None:
        """Do nothing."""

    def starting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lead(self, runner: ModelRunner) -> Runner:
        return runner

    def mask_memory(self, device: torch.device) -> Callable[[int], memoryview]:
        return partial(host_memory, device=device)

    def close(self) -> None:
        """Do nothing."""


ALONE = NoRanks()


class Followers(Protocol):
    """The other ranks, which rank 0 sends its steps. Raise OSError when one has ended."""

    def launch(self, batch: Batch) -> None: ...

    def sample(self, masks: memoryview) -> None: ...

    def read(self) -> None:
        """Read the oldest step with drafts."""

    def await_report(self) -> None:
        """Wait a moment for the report that a rank has ended, which may end this process."""

    def close(self) -> None:
        """End them."""


class RankFailure(Exception):
    """A step failed on one rank, so the ranks' states differ and none can continue."""


class LeadingRunner:
    """Rank 0's runner, which tells the others each step before it computes it."""

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    def kv(self) -> KVPlan:
        return self._runner.kv

    @property
    def depth(self) -> int:
        return self._runner.depth

    def submit(self, batch: Batch) -> Pending:
        """Launch a step on all ranks. Raise RankFailure if it fails, which ends the process."""
        with ends_reported(self._followers):
            self._followers.launch(batch)
            pending = self._runner.submit(batch)
            refuse_failure(self._runner)
        return LedStep(pending, self._runner, self._followers, has_drafts=bool(batch.drafts))

    def close(self) -> None:
        self._runner.close()
        self._followers.close()


class LedStep:
    """A step of all ranks."""

    def __init__(self, pending: Pending, runner: ModelRunner, followers: Followers, *, has_drafts: bool) -> None:
        self._pending = pending
        self._runner = runner
        self._followers = followers
        self._has_drafts = has_drafts

    def drafts(self) -> tuple[int, ...]:
        return self._pending.drafts()

    def sample(self, masks: memoryview) -> None:
        with ends_reported(self._followers):
            self._followers.sample(masks)
            self._pending.sample(masks)
            refuse_failure(self._runner)

    def result(self) -> StepOutput:
        # What was kept of drafts changes the bounds by which all ranks choose shapes.
        if self._has_drafts:
            with ends_reported(self._followers):
                self._followers.read()
        return self._pending.result()


@contextmanager
def ends_reported(followers: Followers) -> Iterator[None]:
    """Report the end of a rank before its consequences fail here, so that no request is blamed."""
    try:
        yield
    except (RankFailure, OSError):
        followers.await_report()
        raise


def refuse_failure(runner: ModelRunner) -> None:
    """Raise RankFailure if a launch has failed; its reason is in the log."""
    if runner.num_failures:
        raise RankFailure("a step failed on one of several ranks")
