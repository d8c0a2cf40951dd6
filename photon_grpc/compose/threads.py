"""The number of compute threads."""

from __future__ import annotations

import os


def limit_threads(num_ranks: int = 1) -> None:
    """Limit torch's threads to the cores of this process, and their spinning, unless OMP_* or GOMP_* is set.

    Ranks that compute together share the cores.

    By default torch counts the machine's cores, even in a container that may use two. GNU's threads spin for
    milliseconds after every operation, slightly faster on idle cores and much slower on shared ones. ms per step of a
    model of Llama-3.2-1B's shape on two cores, both idle / one busy: 57 / 128 by default, 58 / 75 with brief spinning,
    61 / 70 without.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_of(num_ranks)))
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def cores_of(num_ranks: int) -> int:
    """Return the number of cores for each of several ranks."""
    return max(1, available_cores() // num_ranks)


def available_cores() -> int:
    """Return the cores that this process may use, by its affinity and the limit of its control group."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
