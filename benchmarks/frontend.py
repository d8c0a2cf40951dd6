"""Measure what a token costs the front end, in µs of its processor: from a step's frame as bytes to messages as bytes.

    python -m benchmarks.frontend [--cases scores|text] [--streams 64] [--rounds 7] [--beside DIR] [--save NAME]

Steps of so many requests go through the bridge's reader, the front end and InferenceService; the engine and gRPC are
not there. A message holds several tokens where several steps come before its reader has a turn, as in a service under
load. With --beside the same steps go through another checkout of this repository, too, in turns with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import inspect
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

from benchmarks.overhead import PLAN
from benchmarks.saved import add_save_flag, saved
from benchmarks.service import write_tokenizer
from photon_grpc import demo
from photon_grpc.bridge.codec import MAX_STEP_BYTES, UP, FrameReader, encode
from photon_grpc.core.frames import Add, Down, Facts, StepFrame, Up
from photon_grpc.core.logprobs import RECORD
from photon_grpc.core.stats import Load
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.model import ServedModel
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.inference import InferenceService
from photon_grpc.server.wire.writer import StreamWriter
from photon_grpc.v1 import inference_pb2 as pb

_VOCAB_SIZE = 128256
_FACTS = Facts(1 << 17, _VOCAB_SIZE, PLAN, 1 << 20, 1024, 8192, 1024, 1 << 30, "none", "none")
#: Steps that are measured: at least so many, and of so many tokens in all.
_LEAST_STEPS, _LEAST_TOKENS = 128, 8192
_NUM_WARM = 32


class Case(NamedTuple):
    """`logprobs` as in OutputOptions; -1: none."""

    method: str
    logprobs: int
    tokens_per_message: int
    #: "text", "ids", "both" (each id is news, even within a character), or "stops": text with three stop strings that
    #: do not occur.
    output: str = "text"
    #: A key of TOKENIZERS.
    tokenizer: str = "words"


SCORES = tuple(
    Case(method, logprobs, tokens_per_message)
    for method in ("StreamGenerate", "MultiplexGenerate")
    for logprobs in (-1, 0, 5, 20)
    for tokens_per_message in (1, 2, 8)
)
TEXT = tuple(
    Case("StreamGenerate", -1, tokens_per_message, output, tokenizer)
    for tokenizer, output in (
        *(("words", "ids"), ("words", "text"), ("words", "stops")),
        *(("demo", "both"), ("characters", "both")),
    )
    for tokens_per_message in (1, 4, 16)
)
CASES = {"scores": SCORES, "text": TEXT}


class _Countdown:
    """Waits for so many of a kind."""

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._is_over = asyncio.Event()

    def one(self) -> None:
        self._left -= 1
        if not self._left:
            self._is_over.set()

    async def wait(self) -> None:
        """Until all have come; the next ones count from the beginning."""
        await self._is_over.wait()
        self._is_over.clear()
        self._left = self._count


class _Link:
    """An EngineLink."""

    facts = _FACTS

    def __init__(self, added: _Countdown) -> None:
        self._added = added
        self.on_frame: Callable[[Up], None] = lambda frame: None

    def send(self, frame: Down) -> None:
        if isinstance(frame, Add):
            self._added.one()

    def listen(self, on_frame: Callable[[Up], None], on_lost: Callable[[], None]) -> None:
        self.on_frame = on_frame


class _Context:
    """As much of gRPC's as the service uses; it takes every message at once."""

    def __init__(self, written: _Countdown) -> None:
        self._written = written

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "unix:"

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, message: Any) -> None:
        if type(message) is not bytes:
            message.SerializeToString()
        self._written.one()


def request(number: int, logprobs: int, output: str) -> pb.GenerateRequest:
    made = pb.GenerateRequest(request_id=str(number), token_ids=pb.TokenIds(ids=[300]))
    made.stop.max_tokens = 100_000
    made.stop.ignore_eos = True
    if logprobs >= 0:
        made.output.logprobs = logprobs
    made.output.text, made.output.token_ids = output != "ids", output in ("ids", "both")
    if output == "stops":
        made.stop.stop_strings.extend(("\n\n", "###", "<end>"))
    return made


class Spoken(NamedTuple):
    """A model of a tokenizer alone, and ids that it may sample, in their order."""

    model: ServedModel
    ids: tuple[int, ...]


def words(vocab_size: int = _VOCAB_SIZE) -> Spoken:
    """Random words of whole characters, as in `benchmarks.serve`."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), vocab_size)
        tokenizer = Tokenizer.from_file(Path(directory) / "tokenizer.json")
    # Neither bytes nor special tokens.
    ids = random.Random(7).choices(range(256, vocab_size - 256), k=1 << 16)
    return _spoken(tokenizer, vocab_size, ids)


def characters(vocab_size: int = _VOCAB_SIZE) -> Spoken:
    """A byte-level tokenizer without merges: each character of this text takes two to four ids."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), vocab_size)
        tokenizer = Tokenizer.from_file(Path(directory) / "tokenizer.json")
    text = "Ωmega, naïve café, 日本語のテキスト, привет, мир 🙂🙃 "
    return _spoken(tokenizer, vocab_size, tokenizer.encode(text * 40, add_special_tokens=False))


def demo_text(vocab_size: int = 0) -> Spoken:
    """The embedded model's tokenizer, and this file as it spells it."""
    tokenizer = Tokenizer.from_file(Path(demo.TARGET) / "tokenizer.json")
    ids = tokenizer.encode(Path(__file__).read_text(), add_special_tokens=False)
    return _spoken(tokenizer, max(ids) + 1, ids)


def _spoken(tokenizer: Tokenizer, vocab_size: int, ids: Sequence[int]) -> Spoken:
    return Spoken(ServedModel(("words",), _FACTS.max_model_len, vocab_size, tokenizer=tokenizer), tuple(ids))


TOKENIZERS = {"words": words, "characters": characters, "demo": demo_text}


def steps(num_streams: int, logprobs: int, ids: Sequence[int]) -> list[bytes]:
    """Frames with an id of every request, each further on in `ids`, and its scores."""
    draw = random.Random(7)
    starts = [draw.randrange(len(ids)) for _ in range(num_streams)]

    def records() -> bytes:
        best = [RECORD.pack(draw.choice(ids), -draw.random() * rank, rank) for rank in range(1, logprobs + 1)]
        chosen = best[0] if best else RECORD.pack(draw.choice(ids), -draw.random(), 1)
        return chosen + b"".join(best)

    handles = tuple(range(1, num_streams + 1))
    return [
        encode(
            StepFrame(
                step,
                handles,
                tuple(ids[(start + step) % len(ids)] for start in starts),
                (),
                (),
                Load(running=num_streams),
                logprobs={handle: records() for handle in handles} if logprobs >= 0 else {},
            )
        )
        for step in range(_NUM_WARM + max(_LEAST_STEPS, _LEAST_TOKENS // num_streams))
    ]


def _parts(frontend: Frontend) -> tuple[Any, ...]:
    """Arguments of the service; a checkout that is compared with may know fewer."""
    parts = frontend, StreamWriter(60.0), FailureLog()
    return parts[: len(inspect.signature(InferenceService).parameters)]


async def measure(spoken: Spoken, case: Case, num_streams: int) -> float:
    """µs a token."""
    is_multiplexed = case.method == "MultiplexGenerate"
    added, written = _Countdown(num_streams), _Countdown(1 if is_multiplexed else num_streams)
    link = _Link(added)
    model = spoken.model
    requests = [request(number, case.logprobs, case.output) for number in range(num_streams)]
    frames = steps(num_streams, case.logprobs, spoken.ids)
    with ThreadPoolExecutor(1) as pool:
        frontend = Frontend(link=link, model=model, encoder=ThreadEncoder(model, pool))
        service = InferenceService(*_parts(frontend))
        if is_multiplexed:
            calls = [service.MultiplexGenerate(cast(Any, _actions(requests)), cast(Any, _Context(written)))]
        else:
            calls = [service.StreamGenerate(each, cast(Any, _Context(written))) for each in requests]
        tasks = [asyncio.create_task(call) for call in calls]
        await added.wait()
        # The first messages are other ones, and tables fill.
        await _play(frames[:_NUM_WARM], case, link, written)
        spent_s = await _play(frames[_NUM_WARM:], case, link, written)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return spent_s / (num_streams * (len(frames) - _NUM_WARM)) * 1e6


async def _play(frames: list[bytes], case: Case, link: _Link, written: _Countdown) -> float:
    """Seconds of the processor, until every reader was told."""
    reader = FrameReader(UP, max_bytes=MAX_STEP_BYTES)
    start_s = time.process_time()
    for at in range(0, len(frames), case.tokens_per_message):
        for data in frames[at : at + case.tokens_per_message]:
            for frame in reader.feed(data):
                link.on_frame(frame)
        await written.wait()
    return time.process_time() - start_s


async def _actions(requests: list[pb.GenerateRequest]) -> AsyncIterator[pb.MultiplexGenerateRequest]:
    for each in requests:
        yield pb.MultiplexGenerateRequest(generate=each)


def answer() -> None:
    """Measure the case and number of streams that each line of stdin names, and print the figure."""
    spoken: dict[str, Spoken] = {}
    for line in sys.stdin:
        kind, number, num_streams = line.split()
        case = CASES[kind][int(number)]
        if case.tokenizer not in spoken:
            spoken[case.tokenizer] = TOKENIZERS[case.tokenizer]()
            gc.freeze()
        print(asyncio.run(measure(spoken[case.tokenizer], case, int(num_streams))), flush=True)


class Measured:
    """A checkout of this repository, in a process of its own."""

    def __init__(self, root: Path) -> None:
        # This file in both, whatever the checkout has; -P: its directory is not to be searched.
        command = [sys.executable, "-P", __file__, "--answer"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(root)},
        )

    def __call__(self, kind: str, number: int, num_streams: int) -> float:
        stdin, stdout = cast(Any, self._process.stdin), cast(Any, self._process.stdout)
        print(kind, number, num_streams, file=stdin, flush=True)
        return float(stdout.readline())

    def close(self) -> None:
        cast(Any, self._process.stdin).close()
        self._process.wait()


@contextlib.contextmanager
def checkouts(beside: Path | None) -> Iterator[list[Measured]]:
    roots = [*([beside] if beside else []), Path(__file__).parents[1]]
    measured = [Measured(root) for root in roots]
    try:
        yield measured
    finally:
        for each in measured:
            each.close()


def table(kind: str, beside: Path | None, streams: Sequence[int], num_rounds: int) -> None:
    print(f"µs a token; median and least of {num_rounds} rounds\n")
    print(f"| method | output | tokenizer | streams | tokens a message | {'before | ' if beside else ''}here |")
    print("|---|---|---|--:|--:|" + "--:|" * (2 if beside else 1))
    with checkouts(beside) as measured:
        for (number, case), num_streams in itertools.product(enumerate(CASES[kind]), streams):
            rounds = [[each(kind, number, num_streams) for each in measured] for _ in range(num_rounds)]
            cells = [f"{statistics.median(each):.1f} ({min(each):.1f})" for each in zip(*rounds, strict=True)]
            output = case.output if case.logprobs < 0 else f"{case.output}, logprobs {case.logprobs}"
            row = (case.method, output, case.tokenizer, str(num_streams), str(case.tokens_per_message), *cells)
            print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=CASES, default="scores")
    parser.add_argument("--streams", type=int, nargs="*", default=[64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout, measured in turns with this one")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    add_save_flag(parser)
    args = parser.parse_args()
    if args.answer:
        answer()
        return
    with saved(args.save):
        table(args.cases, args.beside, args.streams, args.rounds)


if __name__ == "__main__":
    main()
