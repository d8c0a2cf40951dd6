"""Named serving workloads: what is sent when. Ids come from `workloads.token`, so that any program can send the same.

Every workload takes a `run` number, from which its streams of ids follow: no two runs share a prompt. Lengths and
arrivals are drawn with `random.Random(seed)` of the standard library, in the order in which the docstrings name them.
`scale` multiplies rates and numbers of requests (at least one remains), for machines that are no H200; lengths never
change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import workloads
from photon_grpc.cli.load.load import Session, Turn

ARRIVALS_S = 15.0
#: Streams of one run lie within so many numbers.
_STREAMS_PER_RUN = 1 << 10


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sessions of one run. `rates` are the arrivals per second that it is measured at; empty: it has its own times."""

    make: Callable[[int, float, float], list[Session]]
    rates: tuple[float, ...] = ()

    @property
    def meaning(self) -> str:
        return (self.make.__doc__ or "").partition("\n")[0]


def closed(run: int, concurrency: int) -> list[Session]:
    """`concurrency` slots that start together, each 4 requests one after another, 128 ids in, 128 tokens out."""
    stream = _stream(run) + concurrency % _STREAMS_PER_RUN
    return [
        Session([Turn(workloads.prompt(stream, slot * 8 + turn, 128), 128) for turn in range(4)])
        for slot in range(concurrency)
    ]


def sequence(run: int, rate: float, scale: float) -> list[Session]:
    """One client in sequence: 32 requests one after another, 128 in, 128 out."""
    return [Session([_turn(run, request, 128, 128) for request in range(_count(32, scale))])]


def staggered(run: int, rate: float, scale: float) -> list[Session]:
    """Staggered arrivals: 64 requests, one every 50 ms, n_in = randint(64, 512), n_out = randint(64, 256) (seed 1)."""
    draw = random.Random(1)
    lengths = [(draw.randint(64, 512), draw.randint(64, 256)) for _ in range(_count(64, scale))]
    return [Session([_turn(run, request, *length)], request * 0.05 / scale) for request, length in enumerate(lengths)]


def burst(run: int, rate: float, scale: float) -> list[Session]:
    """A burst of 48 requests at once, n_in = randint(64, 512), n_out = 128 (seed 2)."""
    draw = random.Random(2)
    return [Session([_turn(run, request, draw.randint(64, 512), 128)]) for request in range(_count(48, scale))]


def long(run: int, rate: float, scale: float) -> list[Session]:
    """75 % long prompts with Poisson arrivals over 15 s, 128 out.

    Seed 3; per request: the distance expovariate(rate), then random() < 0.75 → n_in = randint(1024, 3072), else
    randint(64, 256).
    """

    def lengths(draw: random.Random) -> tuple[int, int]:
        return (draw.randint(1024, 3072) if draw.random() < 0.75 else draw.randint(64, 256)), 128

    return _poisson(run, rate * scale, random.Random(3), lengths)


def prefix(run: int, rate: float, scale: float) -> list[Session]:
    """A shared prefix: 64 slots that start together, each 4 requests one after another, 1,024 common ids + 64 own in,
    64 out."""
    common = workloads.prompt(_stream(run) + 1, 0, 1024)

    def turn(request: int) -> Turn:
        return Turn(common + workloads.prompt(_stream(run), request, 64), 64)

    return [Session([turn(slot * 8 + number) for number in range(4)]) for slot in range(_count(64, scale))]


def agent(run: int, rate: float, scale: float) -> list[Session]:
    """Agents: 32 sessions that start together, 8 turns each; a prompt is the whole history and 64 new ids, 64 out."""
    return [
        Session([_turn(run, session * 8 + turn, 64, 64) for turn in range(8)], keeps_history=True)
        for session in range(_count(32, scale))
    ]


def chat(run: int, rate: float, scale: float) -> list[Session]:
    """Chat with Poisson arrivals over 15 s; lengths are log-normal.

    Seed 4; per request: the distance expovariate(rate), then n_in = lognormvariate(5, 1) within 8 … 2,048 and
    n_out = lognormvariate(5, 0.8) within 8 … 512, both cut to whole numbers.
    """

    def lengths(draw: random.Random) -> tuple[int, int]:
        n_in = min(2048, max(8, int(draw.lognormvariate(5.0, 1.0))))
        return n_in, min(512, max(8, int(draw.lognormvariate(5.0, 0.8))))

    return _poisson(run, rate * scale, random.Random(4), lengths)


TRAFFIC = {
    "sequence": Traffic(sequence),
    "staggered": Traffic(staggered),
    "burst": Traffic(burst),
    "long": Traffic(long, (18.0, 27.0, 36.0)),
    "prefix": Traffic(prefix),
    "agent": Traffic(agent),
    "chat": Traffic(chat, (30.0, 60.0, 120.0)),
}


def within(sessions: Sequence[Session], vocab_size: int) -> list[Session]:
    """The same with ids that a smaller vocabulary holds."""
    return [
        Session(
            [Turn([int(token) % vocab_size for token in turn.prompt], turn.output_tokens) for turn in session.turns],
            session.start_s,
            session.keeps_history,
        )
        for session in sessions
    ]


def _poisson(
    run: int, rate: float, draw: random.Random, lengths: Callable[[random.Random], tuple[int, int]]
) -> list[Session]:
    sessions: list[Session] = []
    start_s = draw.expovariate(rate)
    while start_s < ARRIVALS_S or not sessions:
        sessions.append(Session([_turn(run, len(sessions), *lengths(draw))], start_s))
        start_s += draw.expovariate(rate)
    return sessions


def _turn(run: int, request: int, n_in: int, n_out: int) -> Turn:
    return Turn(workloads.prompt(_stream(run), request, n_in), n_out)


def _stream(run: int) -> int:
    return 1000 + run * _STREAMS_PER_RUN


def _count(number: int, scale: float) -> int:
    return max(1, round(number * scale))
