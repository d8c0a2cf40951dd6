"""Chrome trace events of a step trace: a track of steps, counters, and a track for every sequence.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format; times are whole
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from photon_grpc.cli.trace_lines import Line

Event = dict[str, Any]

#: Process ids in the format. A viewer shows a thread with the id of its process as the main thread.
_ENGINE, _SEQUENCES = 1, 2
_STEPS = 1
_FIRST_SEQUENCE = 3


@dataclass(slots=True)
class _Track:
    thread: int
    #: The event of the current run of decode steps, not yet yielded.
    decode: Event | None = None
    has_ended: bool = False


class TraceEvents:
    """The events of a trace, made with a few numbers of state for every sequence."""

    def __init__(self) -> None:
        self.num_steps = self.num_sequences = self.num_missing = 0
        #: The newest step.
        self._number = self._start_us = self._end_us = 0
        self._tracks: dict[str, _Track] = {}
        self._running: set[str] = set()

    def of(self, lines: Iterable[Line]) -> Iterator[Event]:
        """Yield the events of the lines in the order of time, except that decode events come when they end."""
        yield _metadata("process_name", _ENGINE, _STEPS, name="engine")
        yield _metadata("thread_name", _ENGINE, _STEPS, name="steps")
        yield _metadata("process_name", _SEQUENCES, _FIRST_SEQUENCE, name="sequences")
        for line in lines:
            if "step" in line:
                yield from self._step(line)
            if "blocks" in line and self.num_steps:
                yield from self._rest(line)
            if dropped := line.get("dropped", 0):
                self.num_missing += dropped
                yield _event("i", "missing lines", _ENGINE, _STEPS, self._start_us, s="t", args={"lines": dropped})
        yield from self._idle()
        for track in self._tracks.values():
            yield from _flushed(track)

    def _step(self, line: Line) -> Iterator[Event]:
        launched_us, took_us = _us(line["start_s"]), _us(line["duration_s"])
        # Steps overlap if one is launched before its predecessor has been read.
        self._start_us = max(launched_us, self._end_us)
        if self._start_us > self._end_us and self.num_steps:
            yield from self._idle()
        self._end_us = max(launched_us + took_us, self._start_us)
        self.num_steps, self._number = self.num_steps + 1, line["step"]
        name = " and ".join(kind for kind in ("prefill", "decode") if line[kind]) or "no rows"
        yield self._bar(name, _ENGINE, _STEPS, _counts(line) | {"launched_us": launched_us, "took_us": took_us})
        yield _counter("tokens", self._start_us, prefill=line["prefill_tokens"], decode=line["decode_tokens"])
        for each in line["seated"]:
            yield from self._seat(each, launched_us)
        for row in line["prefill"]:
            yield from self._prefill(*row)
        for row in line["decode"]:
            yield from self._decode(*row)

    def _bar(self, name: str, process: int, thread: int, args: dict[str, Any]) -> Event:
        """Return an event as long as the step."""
        return _event("X", name, process, thread, self._start_us, dur=self._end_us - self._start_us, args=args)

    def _idle(self) -> Iterator[Event]:
        """Set the token counters to 0 from the end of the step on."""
        yield _counter("tokens", self._end_us, prefill=0, decode=0)

    def _seat(self, each: dict[str, Any], launched_us: int) -> Iterator[Event]:
        """Yield the time that a sequence waited; after a preemption, the moment when it resumes."""
        name, track = each["sequence"], self._tracks.get(each["sequence"])
        self._running.add(name)
        # A restarted front end counts its handles from 0 again.
        if track is None or track.has_ended:
            arrived_us = max(launched_us - _us(each["queue_s"]), 0)
            track = yield from self._begin(name, each["request_id"] + (f" #{each['output']}" if each["output"] else ""))
            yield _event("X", "queued", _SEQUENCES, track.thread, arrived_us, dur=launched_us - arrived_us, args=each)
        else:
            yield _event("i", "seated again", _SEQUENCES, track.thread, launched_us, s="t", args=each)

    def _begin(self, name: str, title: str) -> Generator[Event, None, _Track]:
        track = self._tracks[name] = _Track(_FIRST_SEQUENCE + self.num_sequences)
        self.num_sequences += 1
        yield _metadata("thread_name", _SEQUENCES, track.thread, name=title)
        yield _metadata("thread_sort_index", _SEQUENCES, track.thread, sort_index=track.thread)
        return track

    def _prefill(self, name: str, first: int, num_tokens: int) -> Iterator[Event]:
        track = yield from self._track(name)
        yield from _flushed(track)
        args = {"step": self._number, "first_position": first, "tokens": num_tokens}
        yield self._bar("prefill", _SEQUENCES, track.thread, args)

    def _decode(self, name: str, first: int, num_tokens: int) -> Iterator[Event]:
        track = yield from self._track(name)
        if (run := track.decode) is not None and run["args"]["last_step"] == self._number - 1:
            run["dur"] = self._end_us - run["ts"]
            run["args"]["last_step"] = self._number
            run["args"]["tokens"] += num_tokens
        else:
            yield from _flushed(track)
            steps = {"first_step": self._number, "last_step": self._number}
            args = steps | {"first_position": first, "tokens": num_tokens}
            track.decode = self._bar("decode", _SEQUENCES, track.thread, args)

    def _track(self, name: str) -> Generator[Event, None, _Track]:
        """Return the track of a sequence; begin one if it got its slot before the first step."""
        if name not in self._tracks:
            self._running.add(name)
            yield from self._begin(name, name)
        return self._tracks[name]

    def _rest(self, line: Line) -> Iterator[Event]:
        """Yield preemptions, ends, requests and blocks, as reported with a step or after it."""
        for name in line["preempted"]:
            yield from self._left(name, "preempted")
        for name, why in line["ended"]:
            yield from self._left(name, f"ended: {why}")
            if name in self._tracks:
                self._tracks[name].has_ended = True
        yield _counter("requests", self._end_us, queued=line["queued"], running=len(self._running))
        yield _counter("KV blocks", self._end_us, **line["blocks"])

    def _left(self, name: str, why: str) -> Iterator[Event]:
        self._running.discard(name)
        if track := self._tracks.get(name):
            yield from _flushed(track)
            yield _event("i", why, _SEQUENCES, track.thread, self._end_us, s="t")


def write_events(head: Line, events: Iterable[Event], file: TextIO) -> None:
    """Write one JSON object, with one event a line."""
    file.write(f'{{"displayTimeUnit": "ms", "metadata": {json.dumps(head)}, "traceEvents": [')
    for number, event in enumerate(events):
        file.write(f"{',' if number else ''}\n{json.dumps(event)}")
    file.write("\n]}\n")


def _counts(line: Line) -> dict[str, int]:
    tokens = {name: line[name] for name in ("step", "prefill_tokens", "decode_tokens")}
    return tokens | {f"{kind}_rows": len(line[kind]) for kind in ("prefill", "decode")}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _event(phase: str, name: str, process: int, thread: int, ts: int, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": process, "tid": thread, "ts": ts, **more}


def _metadata(kind: str, process: int, thread: int, **args: Any) -> Event:
    return _event("M", kind, process, thread, 0, args=args)


def _counter(name: str, ts: int, **values: int) -> Event:
    return _event("C", name, _ENGINE, _STEPS, ts, args=values)


def _flushed(track: _Track) -> Iterator[Event]:
    if track.decode is not None:
        yield track.decode
        track.decode = None
