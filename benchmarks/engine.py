"""A loaded model behind an engine within this program: requests in, when their tokens came out. No front end, no
wire."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import click
import torch

from benchmarks import workloads
from benchmarks.service import write_tokenizer
from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.cli import serve
from photon_grpc.compose.assemble import Assembled, assemble
from photon_grpc.compose.leading_rank import ranks_of
from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.resolve import resolve
from photon_grpc.core.frames import Add, Down, StepFrame, Up
from photon_grpc.core.ports import EnginePorts, Event
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.stats import Load
from photon_grpc.engine.scheduler.scheduler import Scheduler


def config_of(flags: Sequence[str]) -> ServeConfig:
    """Return what `photon-grpc serve` would run with. Raise ConfigError and click.ClickException."""
    with click.Context(serve.serve) as context:
        serve.serve.parse_args(context, list(flags))
        return resolve(context.params, {}).config


@contextlib.contextmanager
def loaded(shape: str, flags: Sequence[str] = (), max_len: int = 0, *, has_tokenizer: bool = False) -> Iterator[Work]:
    """The shape with random weights ("demo": the embedded model), ready to compute; says what it is. Frees the device's
    memory at the end.

    max_len: positions that the shape is made for, where they are more than those of the named workloads.
    has_tokenizer: of random words, for grammars.
    """
    with tempfile.TemporaryDirectory() as directory:
        model = [] if shape == "demo" else ["--model", str(workloads.write_model_dir(shape, Path(directory), max_len))]
        model += ["--load-format", "dummy"] if model else []
        if model and has_tokenizer:
            vocab_size = workloads.SHAPES[shape]["vocab_size"]
            write_tokenizer(Path(directory), min(vocab_size, workloads.VOCAB_SIZE))
        start_s = time.perf_counter()
        config = config_of([*model, *flags])
        assembled = assemble(config, lambda stage, done, total: None, ranks_of(config))
    facts = assembled.facts
    print(
        f"\n## {shape} on {facts.device}, {facts.dtype}, "
        f"{facts.num_blocks} KV blocks of {facts.kv.block_size}, kernels {facts.kernels}, "
        f"loaded in {time.perf_counter() - start_s:.1f} s{'; flags: ' + ' '.join(flags) if flags else ''}",
        flush=True,
    )
    gc.collect()
    gc.freeze()
    work = Work(assembled)
    del assembled
    try:
        yield work
    finally:
        work.close()
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


class Work:
    """The bridge of an engine, both ends of it."""

    def __init__(self, assembled: Assembled) -> None:
        self._frames: list[tuple[int, Down]] = []
        self.runner = assembled.runner
        self.ranks = assembled.ranks
        self.vocabulary = assembled.vocabulary
        self.mask_memory = assembled.mask_memory()
        self._engine = assembled.engine(EnginePorts(self, self, NoHeartbeat()))
        self._handles = 0
        self.facts = assembled.facts
        #: Requests that have not ended, tokens since the last submission, seconds from it to the first of them, and
        #: when each step's came, and to how many rows.
        self.num_open = 0
        self.num_tokens = 0
        self.first_s = 0.0
        self.step_times_s: list[float] = []
        self.step_rows: list[int] = []
        #: Of every request since the last submission.
        self.ids: dict[int, list[int]] = {}
        self._submitted_s = 0.0

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down]]:
        frames, self._frames = self._frames, []
        return frames

    def wake(self, event: Event) -> None:
        """Nothing here waits for another thread."""

    def send(self, frontend: int, frame: Up) -> None:
        if not isinstance(frame, StepFrame):
            return
        if frame.failed:
            raise RuntimeError(f"a request failed: {frame.failed[0].fault.message}")
        now = time.perf_counter()
        if frame.ids:
            self.step_times_s.append(now)
            self.step_rows.append(len(frame.ids))
            if not self.num_tokens:
                self.first_s = now - self._submitted_s
        self.num_tokens += len(frame.ids)
        for handle, token in zip(frame.handles, frame.ids, strict=True):
            self.ids.setdefault(handle, []).append(token)
        self.num_open -= len(frame.finished)

    def broadcast(self, load: Load) -> None:
        pass

    def submit(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int], *, share: bool = False) -> None:
        """Greedy, EOS ignored, exactly so many tokens each; `share`: through the prefix cache."""
        self.num_tokens, self.step_times_s, self.step_rows, self.ids = 0, [], [], {}
        self._submitted_s = time.perf_counter()
        vocab_size = self.facts.vocab_size
        for ids, count in zip(prompts, num_tokens, strict=True):
            self._handles += 1
            self.num_open += 1
            prompt = tuple(ids) if vocab_size >= workloads.VOCAB_SIZE else tuple([token % vocab_size for token in ids])
            request = Request(
                str(self._handles),
                prompt,
                SamplingParams(0.0),
                StopParams(count),
                time.monotonic(),
                bypass_prefix_cache=not share,
            )
            self._frames.append((0, Add(self._handles, request)))

    def step(self) -> None:
        self._engine.step()

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int], *, share: bool = False) -> float:
        """Seconds from the submission of all of them to the last token."""
        self.submit(prompts, num_tokens, share=share)
        while self.num_open:
            self._engine.step()
        return time.perf_counter() - self._submitted_s

    def close(self) -> None:
        """Lets go of the model, whoever else may still hold this object."""
        self.runner.close()
        del self._engine, self.runner, self.ranks

    def slow_step_ms(self) -> float:
        """The 99th percentile of the distances between steps that brought tokens, since the last submission."""
        times = self.step_times_s
        gaps = sorted(after - before for before, after in pairwise(times))
        return gaps[int(len(gaps) * 0.99)] * 1e3 if gaps else 0.0
