"""Counters and histograms as plain data: counted in each front end, summed where they are told to the outside."""

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
    """A counter, or with `bounds` a histogram."""

    name: str
    help: str
    #: Names of its labels. Values are of a closed set, never a caller's text.
    labels: Labels = ()
    #: Upper bounds of the buckets, ascending, inclusive.
    bounds: tuple[float, ...] = ()
    #: Values of its label that are shown before anything is counted: a rate misses the first of a series that appears.
    known: tuple[str, ...] = ()

    def zero(self) -> list[float]:
        """Return a counter's value; a histogram's observations by bucket (the last: above all bounds), then their
        sum."""
        return [0.0] * (len(self.bounds) + 2 if self.bounds else 1)


class Series(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of one metric under one set of label values since its process began: none of them ever falls."""

    name: str
    labels: Labels
    values: tuple[float, ...]


class Counts:
    """Those of one process. Something is counted when a call or a request begins or ends, nothing for a token."""

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
        """Return the series that something was added to, and that were not `told` since."""
        return tuple([Series(name, labels, tuple(self._values[name, labels])) for name, labels in self._changed])

    def told(self) -> None:
        """Note that what `changed` returned has arrived."""
        self._changed.clear()

    def _of(self, metric: Metric, labels: Labels) -> list[float]:
        key = (metric.name, labels)
        self._changed.add(key)
        values = self._values.get(key)
        if values is None:
            values = self._values[key] = metric.zero()
        return values


class Sums:
    """Over processes that come and go. What one has counted stays when it is gone, so that no sum ever falls."""

    def __init__(self) -> None:
        self._gone: dict[tuple[str, Labels], tuple[float, ...]] = {}
        self._alive: dict[int, dict[tuple[str, Labels], tuple[float, ...]]] = {}

    def told(self, process: int, news: Iterable[Series]) -> None:
        """The newest series of the process that has this place."""
        known = self._alive.setdefault(process, {})
        for series in news:
            known[series.name, series.labels] = series.values

    def gone(self, process: int) -> None:
        """The process has ended; the next one in its place begins at zero."""
        for key, values in self._alive.pop(process, {}).items():
            self._gone[key] = _added(self._gone.get(key), values)

    def of(self, metric: Metric) -> dict[Labels, tuple[float, ...]]:
        """Label values -> numbers, sorted."""
        first = [(value,) for value in metric.known] if metric.labels else [()]
        found: dict[Labels, tuple[float, ...]] = dict.fromkeys(first, tuple(metric.zero()))
        for each in (self._gone, *self._alive.values()):
            for (name, labels), values in each.items():
                if name == metric.name:
                    found[labels] = _added(found.get(labels), values)
        return dict(sorted(found.items()))


class EngineSums:
    """The counters of the engine over all its lives, which are numbered; front ends tell of them late and in any
    order."""

    #: Fields of Load that count since the engine's start.
    COUNTERS = (
        *("steps", "prompt_tokens", "cached_prompt_tokens", "session_cached_prompt_tokens", "output_tokens"),
        *("overrun_tokens", "preemptions", "finished", "failed", "cancelled"),
    )

    def __init__(self) -> None:
        #: Of this life and the one before, of which there may still be news.
        self._newest: dict[int, Load] = {}
        self._past = [0] * len(self.COUNTERS)

    def told(self, life: int, load: Load) -> None:
        """One of its moments; of two the later one has counted more."""
        if sum(self._counters(load)) >= sum(self._counters(self._newest.get(life, Load()))):
            self._newest[life] = load

    def begin(self, life: int) -> None:
        """This one is next."""
        for old in [each for each in self._newest if each < life - 1]:
            self._past = list(map(add, self._past, self._counters(self._newest.pop(old))))

    def load(self, life: int) -> Load:
        """Return the newest of this life, with the counters of all."""
        sums = self._past
        for load in self._newest.values():
            sums = list(map(add, sums, self._counters(load)))
        return msgspec.structs.replace(self._newest.get(life, Load()), **dict(zip(self.COUNTERS, sums, strict=True)))

    def _counters(self, load: Load) -> list[int]:
        return [getattr(load, name) for name in self.COUNTERS]


def _added(one: tuple[float, ...] | None, other: tuple[float, ...]) -> tuple[float, ...]:
    return other if one is None else tuple(map(add, one, other))
