"""Measure what the engine's own decisions cost per step, with a runner that computes nothing.

    python -m benchmarks.overhead [--seqs 64] [--steps 2000]

Prints the median and the 99th percentile over steps in which every sequence decodes one token: scheduling, settling,
and the frame for the front end; no model, no socket.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.saved import add_save_flag, saved
from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.frames import Add, Down, Facts, Up, Watch
from photon_grpc.core.kv import KVGroup, KVPlan, PageFormat, Section
from photon_grpc.core.ports import EnginePorts
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.stats import Load
from photon_grpc.engine.blocks.allocation import GrowOnDemand
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.blocks.prefix_index import RadixIndex
from photon_grpc.engine.engine import Engine
from photon_grpc.engine.scheduler.policy import Priority
from photon_grpc.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from photon_grpc.engine.step_trace import JsonlStepTrace
from photon_grpc.engine.trace_file import TraceFile

BLOCK_SIZE = 16
PLAN = KVPlan((KVGroup((Section(PageFormat(1, 1, "float32"), (0,)),)),), BLOCK_SIZE)


class _Landed:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def drafts(self) -> tuple[int, ...]:
        return ()

    def sample(self, masks: memoryview) -> None:
        pass

    def result(self) -> StepOutput:
        return StepOutput(self._batch.step, (5,) * sum(self._batch.yields))


class NullRunner:
    """A runner that samples the same id for every row, at once."""

    kv = PLAN

    def __init__(self, num_blocks: int, depth: int) -> None:
        self.num_blocks = num_blocks
        self.depth = depth

    def submit(self, batch: Batch) -> _Landed:
        return _Landed(batch)

    def close(self) -> None:
        pass


class Bridge:
    """A bridge to nowhere."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, Down]] = []

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down]]:
        frames, self.frames = self.frames, []
        return frames

    def send(self, frontend: int, frame: Up) -> None:
        pass

    def broadcast(self, load: Load) -> None:
        pass


def measure(
    num_seqs: int,
    num_steps: int,
    depth: int,
    prompt_tokens: int = 128,
    trace_file: str = "",
    clock: Callable[[], float] = time.perf_counter,
    is_watched: bool = False,
) -> list[float]:
    """Seconds of each step, by `clock`; with a `trace_file` the steps are traced, `is_watched` by a front end."""
    length = prompt_tokens + num_steps + 200
    num_blocks = num_seqs * (length // BLOCK_SIZE + 2)
    pool = BlockPool(PLAN, num_blocks, RadixIndex(PLAN), GrowOnDemand())
    scheduler = Scheduler(SchedulerLimits(num_seqs, 8192), Priority(), pool)
    facts = Facts(length, 1000, PLAN, num_blocks, num_seqs, 8192, 1024, 1 << 20, "none", "none")
    post = Bridge()
    trace = JsonlStepTrace(TraceFile(trace_file), facts) if trace_file else None
    ports = EnginePorts(post, post, NoHeartbeat())
    engine = Engine(scheduler, NullRunner(num_blocks, depth), ports, facts, trace=trace)
    if is_watched:
        post.frames.append((0, Watch(is_on=True)))
    for handle in range(num_seqs):
        prompt = tuple((handle * 7 + i) % 1000 for i in range(prompt_tokens))
        post.frames.append(
            (0, Add(handle, Request(str(handle), prompt, SamplingParams(0.0), StopParams(num_steps + 100), 0.0)))
        )
    for _ in range(50):
        engine.step()
    gc.freeze()
    times = []
    for _ in range(num_steps):
        start = clock()
        engine.step()
        times.append(clock() - start)
    if trace is not None:
        trace.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=2000)
    add_save_flag(parser)
    args = parser.parse_args()
    with saved(args.save):
        table(args.seqs, args.steps)


def table(seqs: Sequence[int], num_steps: int) -> None:
    print("| running | depth | median µs/step | p99 µs/step |\n|--:|--:|--:|--:|")
    for num_seqs in seqs:
        for depth in (0, 1):
            times = sorted(measure(num_seqs, num_steps, depth))
            print(
                f"| {num_seqs} | {depth} | {statistics.median(times) * 1e6:.1f} | "
                f"{times[int(len(times) * 0.99)] * 1e6:.1f} |"
            )


if __name__ == "__main__":
    main()
