"""What the processes of a service hold at one moment, and how that changed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression

from tests.attack.victim import Victim, memory_mib, num_descriptors

#: What a process may have more of afterwards: connections that gRPC closes later, threads of a pool.
_SPARE = {"files": 4, "threads": 4, "maps": 400}


@dataclass(frozen=True, slots=True)
class Held:
    """One process's."""

    memory_mib: float
    files: int
    threads: int
    maps: int

    @classmethod
    def by(cls, pid: int) -> Held:
        proc = Path(f"/proc/{pid}")
        threads = len(list((proc / "task").iterdir()))
        maps = len((proc / "maps").read_text().splitlines())
        return cls(memory_mib(pid), num_descriptors(pid), threads, maps)

    def surplus(self, before: Held) -> list[str]:
        """What it has too much of."""
        return [
            f"{getattr(self, name)} {name} and {getattr(before, name)} before"
            for name, spare in _SPARE.items()
            if getattr(self, name) > getattr(before, name) + spare
        ]


def processes(victim: Victim) -> dict[str, int]:
    """All of a service: supervisor, engine, front end and its encoder."""
    pids = victim.pids()
    children = Path(f"/proc/{pids['frontend']}/task/{pids['frontend']}/children").read_text().split()
    return {"supervisor": victim.service.process.pid, **pids, "encoder": int(children[0])}


def held(victim: Victim) -> dict[str, Held]:
    return {role: Held.by(pid) for role, pid in processes(victim).items()}


@dataclass
class Series:
    """Samples over time."""

    times_s: list[float] = field(default_factory=list)
    samples: list[dict[str, Held]] = field(default_factory=list)

    def take(self, victim: Victim) -> None:
        self.times_s.append(time.monotonic())
        self.samples.append(held(victim))

    def growth(self, role: str) -> float:
        """MiB an hour, by least squares over the second half."""
        half = len(self.samples) // 2
        memory = [sample[role].memory_mib for sample in self.samples[half:]]
        return 3600 * linear_regression(self.times_s[half:], memory).slope if len(memory) > 1 else 0.0

    def told(self) -> str:
        """From the first to the last sample."""
        first, last = self.samples[0], self.samples[-1]
        return "; ".join(self._told(role, first[role], last[role]) for role in first)

    def _told(self, role: str, first: Held, last: Held) -> str:
        memory = f"{first.memory_mib:.0f} → {last.memory_mib:.0f} MiB ({self.growth(role):+.0f} an hour)"
        counts = (f"{getattr(first, name)} → {getattr(last, name)} {name}" for name in _SPARE)
        return ", ".join((f"{role} {memory}", *counts))
