"""What every test relies on: one thread for tensors, no network, no deadline for hypothesis, GPU tests only on GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch and tokenizers are imported, and inherited by the processes that tests start. One thread makes
# float32 sums the same on every machine; many threads only cost time on tensors this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, not whether the code is right.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("untimed", UNTIMED)
# The same examples every time, for a gate: a change is judged by what it changed. Everybody else's runs search on.
settings.register_profile("same", UNTIMED, derandomize=True)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `tests/attack` takes: options are read before its conftest is."""
    parser.addoption("--attack", choices=("short", "long"), default="short", help="how large the attacks are")
    parser.addoption("--soak", type=float, metavar="SECONDS", help="how long mixed traffic lasts")
    parser.addoption("--attack-figures", type=Path, metavar="PATH", help="write what they did to PATH (.md or .json)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; torch is imported only if there are such tests."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
