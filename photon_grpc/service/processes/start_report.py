"""The report of a child process with torch to `doctor`, which runs without torch."""

from __future__ import annotations

from typing import Any, NamedTuple


class StartReport(NamedTuple):
    """The report of `check_start.py`."""

    #: The reasons why `serve` would not start.
    problems: list[str]
    #: The version of the numerics with which it would; "" if unknown.
    numerics_version: str
    #: What `torch_devices` returned; None if it was not called.
    torch: dict[str, Any] | None = None
    #: What was not checked, for people.
    notes: tuple[str, ...] = ()


def torch_devices() -> dict[str, Any]:
    """Return what torch knows of this machine: its CUDA version, the GPUs, the pairs of GPUs without peer access."""
    import torch

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_properties(index) for index in range(num_devices)]
    pairs = [(first, second) for first in range(num_devices) for second in range(first)]
    return {
        "cuda": torch.version.cuda,
        "apart": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
        "devices": [
            {"name": each.name, "bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
            for each in devices
        ],
    }
