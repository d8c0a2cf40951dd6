"""Inside a runner."""

from __future__ import annotations

from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.step import Step


def step_of(runner: ModelRunner) -> Step:
    """What it launches, whatever shares out the threads."""
    launch = runner._launch_body
    return getattr(launch, "_launch", launch)._step  # type: ignore[no-any-return]
