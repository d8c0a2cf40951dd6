"""Access to the inside of a runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.step import Step


def launch_of(runner: ModelRunner) -> Any:
    """Return its launch, an EagerLaunch or a GraphLaunch, whatever assigns the threads."""
    launch = runner.launch_body
    return getattr(launch, "_launch", launch)


def step_of(runner: ModelRunner) -> Step:
    """Return the step that it launches."""
    return launch_of(runner)._step  # type: ignore[no-any-return]


def poison_first_row(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make row 0 of all later logits NaN."""
    head = step_of(runner).sampler._head
    logits = head.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        made = logits(hidden)
        made[0] = torch.nan
        return made

    monkeypatch.setattr(head, "logits", poisoned)
