"""Counters and histograms as plain data, counted in each front end and summed where they are exported."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import add

import msgspec

from photon_grpc.core.stats import Load

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter, or a histogram if it has `bounds`."""

    name: str
    help: str
    #: Names of its labels. Their values come from a closed set, or are bounded in number if callers choose them.
    labels: Labels = ()
    #: Upper bounds of the buckets, ascending, inclusive.
    bounds: tuple[float, ...] = ()
    #: Label values exported before anything is counted, since a rate misses the first count of a new series.
    known: tuple[str, ...] = ()

    def zero(self) -> list[float]:
        """Return the initial values.

        A counter has one value. A histogram has its observations by bucket, the last one above all bounds, then their
        sum.
        """
        return [0.0] * (len(self.bounds) + 2 if self.bounds else 1)


class Series(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of one metric for one set of label values since its process began. They never decrease."""

    name: str
    labels: Labels
    values: tuple[float, ...]


class Counts:
    """The counts of one process, changed when a call or a request begins or ends, never per token."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Labels], list[float]] = {}
        self._changed: set[tuple[str, Labels]] = set()

    def add(self, counter: Metric, *labels: str, amount: float = 1.0) -> None:
        self._of(counter, labels)[0] += amount

    def observe(self, histogram: Metric, value: float, *labels: str) -> None:
        values = self._of(histogram, labels)
        values[bisect_left(histogram.bounds, value)] += 1
        values[-1] += value

    def changed(self) -> tuple[Series, ...]:
        """Return the series that have changed since the last `acknowledge`."""
        return tuple([Series(name, labels, tuple(self._values[name, labels])) for name, labels in self._changed])

    def acknowledge(self, series: Iterable[Series]) -> None:
        """Note that these series, which `changed` has just returned, have arrived."""
        self._changed.difference_update((each.name, each.labels) for each in series)

    def _of(self, metric: Metric, labels: Labels) -> list[float]:
        key = (metric.name, labels)
        self._changed.add(key)
        values = self._values.get(key)
        if values is None:
            values = self._values[key] = metric.zero()
        return values


class Sums:
    """Sums over processes that come and go. The counts of a process remain after its end, so sums never decrease."""

    def __init__(self) -> None:
        self._gone: dict[tuple[str, Labels], tuple[float, ...]] = {}
        self._alive: dict[int, dict[tuple[str, Labels], tuple[float, ...]]] = {}

    def update(self, process: int, changed: Iterable[Series]) -> None:
        """Store the newest series of the process with this number."""
        known = self._alive.setdefault(process, {})
        for series in changed:
            known[series.name, series.labels] = series.values

    def gone(self, process: int) -> None:
        """Keep the counts of a process that has ended; the next one with its number begins at zero."""
        for key, values in self._alive.pop(process, {}).items():
            self._gone[key] = _added(self._gone.get(key), values)

    def of(self, metric: Metric) -> dict[Labels, tuple[float, ...]]:
        """Map the label values of a metric to its numbers, sorted."""
        first = [(value,) for value in metric.known] if metric.labels else [()]
        found: dict[Labels, tuple[float, ...]] = dict.fromkeys(first, tuple(metric.zero()))
        for each in (self._gone, *self._alive.values()):
            for (name, labels), values in each.items():
                if name == metric.name:
                    found[labels] = _added(found.get(labels), values)
        return dict(sorted(found.items()))


class EngineSums:
    """The counters of the engine over all its lives, which are numbered; front ends report them late, in any order."""

    #: Fields of Load that count since the engine's start.
    COUNTERS = (
        *("steps", "prompt_tokens", "cached_prompt_tokens", "session_cached_prompt_tokens", "output_tokens"),
        *("overrun_tokens", "preemptions", "finished", "failed", "cancelled"),
        *("expert_layers", "experts_reached", "busiest_expert_tokens", "expert_tokens"),
    )

    def __init__(self) -> None:
        #: The newest Load of this life, and of the one before, for which reports may still arrive.
        self._newest: dict[int, Load] = {}
        self._past = [0] * len(self.COUNTERS)

    def update(self, life: int, load: Load) -> None:
        """Store a Load of this life if it is the newest; the later of two has counted more."""
        if sum(self._counters(load)) >= sum(self._counters(self._newest.get(life, Load()))):
            self._newest[life] = load

    def begin(self, life: int) -> None:
        """Start this life; lives older than the one before become part of the past."""
        for old in [each for each in self._newest if each < life - 1]:
            self._past = list(map(add, self._past, self._counters(self._newest.pop(old))))

    def load(self, life: int) -> Load:
        """Return the newest Load of this life, with the counters of all lives."""
        sums = self._past
        for load in self._newest.values():
            sums = list(map(add, sums, self._counters(load)))
        return msgspec.structs.replace(self._newest.get(life, Load()), **dict(zip(self.COUNTERS, sums, strict=True)))

    def _counters(self, load: Load) -> list[int]:
        return [getattr(load, name) for name in self.COUNTERS]


def _added(one: tuple[float, ...] | None, other: tuple[float, ...]) -> tuple[float, ...]:
    return other if one is None else tuple(map(add, one, other))
