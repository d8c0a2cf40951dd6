"""The number of threads that compute."""

from __future__ import annotations

import os


def limit_threads() -> None:
    """As many torch threads as this process has cores, and they soon sleep where they wait, unless OMP_* or GOMP_* says
    otherwise.

    torch would count the machine's cores, also in a container that has two of them. GNU's threads spin for milliseconds
    at the end of every operation, which is a little faster on idle cores and ruinous on shared ones. Llama-3.2-1B's
    shape on two cores, ms a step with both idle / one busy: 57 / 128 as it is, 58 / 75 spinning briefly, 61 / 70 never.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def available_cores() -> int:
    """Cores that this process may use: its affinity, and its share where a control group limits it."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
