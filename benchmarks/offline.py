"""The engine without the wire on the named workloads: decode, prefill, TTFT, mixed, shared prefix.

    python -m benchmarks.offline [--shape 1b 8b] [--work decode prefill ttft mixed prefix] [--batch 1 8 64 256] [FLAGS OF serve]

Random weights; every request greedy, EOS ignored, exactly its output tokens. The floor is weight bytes + KV bytes at context 272 over 4.10 TB/s
(what one H200 reads). vLLM's figures are those of version 0.24.0 on the same card, measured apart from this run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import workloads
from photon_grpc.compose.assemble import Assembled, assemble
from photon_grpc.config.resolve import resolve
from photon_grpc.core.frames import Add, Down, StepFrame, Up
from photon_grpc.core.request import Request, SamplingParams, StopParams

READ_BYTES_PER_S = 4.10e12
#: ms per decode step, then tok/s of prefill 32 × 2048, ms to the first token (2048, 128), mixed tok/s, shared prefix in s.
VLLM_DECODE_MS = {
    "1b": {1: 1.296, 4: 1.397, 8: 1.329, 16: 1.542, 32: 1.677, 64: 1.804, 128: 2.363, 256: 3.153},
    "8b": {1: 5.150, 4: 5.207, 8: 5.200, 16: 5.313, 32: 5.644, 64: 6.110, 128: 7.526, 256: 11.292},
}
VLLM_PREFILL = {"1b": 269_791, "8b": 42_701}
VLLM_TTFT_MS = {"1b": (10.86, 4.89), "8b": (51.29, 8.48)}
VLLM_MIXED = {"1b": 42_703, "8b": 9_157}
VLLM_PREFIX_S = {"1b": 0.50}


class Work:
    """A bridge within this program: requests in, when their tokens came out."""

    def __init__(self, assembled: Assembled) -> None:
        self._frames: list[tuple[int, Down]] = []
        self._engine = assembled.engine(self, self)
        self._handles = 0
        self._open = 0
        self.num_tokens = 0
        self.first_s = 0.0

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down]]:
        frames, self._frames = self._frames, []
        return frames

    def send(self, frontend: int, frame: Up) -> None:
        if not isinstance(frame, StepFrame):
            return
        if frame.failed:
            raise RuntimeError(frame.failed[0].message)
        if frame.ids and not self.num_tokens:
            self.first_s = time.perf_counter()
        self.num_tokens += len(frame.ids)
        self._open -= len(frame.finished)

    def run(self, prompts: Sequence[tuple[int, ...]], num_tokens: Sequence[int], *, share: bool = False) -> float:
        """Seconds from the submission of all of them to the last token."""
        self.num_tokens = 0
        start = time.perf_counter()
        for ids, count in zip(prompts, num_tokens, strict=True):
            self._handles += 1
            self._open += 1
            stop = StopParams(count)
            request = Request(
                str(self._handles), ids, SamplingParams(0.0), stop, time.monotonic(), bypass_prefix_cache=not share
            )
            self._frames.append((0, Add(self._handles, request)))
        while self._open:
            self._engine.step()
        elapsed = time.perf_counter() - start
        self.first_s -= start
        return elapsed


def decode(work: Work, shape: str, batches: Sequence[int]) -> None:
    print("\n| batch | ms/step | tok/s | floor ms | vLLM 0.24 ms | ours / vLLM |\n|--:|--:|--:|--:|--:|--:|")
    for batch in batches:
        prompts = [workloads.prompt(900, request, 128) for request in range(batch)]
        work.run(prompts, [32] * batch)
        long = statistics.median(work.run(prompts, [256] * batch) for _ in range(3))
        short = statistics.median(work.run(prompts, [32] * batch) for _ in range(3))
        step_ms = (long - short) / 224 * 1e3
        floor = (workloads.weight_bytes(shape) + workloads.kv_bytes(shape, [272] * batch)) / READ_BYTES_PER_S * 1e3
        peer = VLLM_DECODE_MS[shape].get(batch)
        ratio = f"{peer:.3f} | {step_ms / peer:.2f}" if peer else "– | –"
        print(f"| {batch} | {step_ms:.3f} | {batch * 256 / long:.0f} | {floor:.3f} | {ratio} |", flush=True)


def prefill(work: Work, shape: str) -> None:
    prompts = [workloads.prompt(901, request, 2048) for request in range(32)]
    work.run(prompts[:2], [1, 1])
    elapsed = statistics.median(work.run(prompts, [1] * 32) for _ in range(3))
    rate = 32 * 2048 / elapsed
    print(
        f"\nprefill 32 × 2048: {rate:,.0f} prompt tok/s, vLLM {VLLM_PREFILL[shape]:,}: {rate / VLLM_PREFILL[shape]:.2f}×",
        flush=True,
    )


def ttft(work: Work, shape: str) -> None:
    for length, repeats, peer in zip((2048, 128), (7, 15), VLLM_TTFT_MS[shape], strict=True):
        times = [work.run([workloads.prompt(902, request, length)], [1]) * 1e3 for request in range(repeats + 2)]
        median = statistics.median(times[2:])
        print(f"TTFT {length}: {median:.2f} ms, vLLM {peer}: {median / peer:.2f}×", flush=True)


def mixed(work: Work, shape: str) -> None:
    lengths = workloads.mixed_512()
    prompts = [workloads.prompt(903, request, n_in) for request, (n_in, _) in enumerate(lengths)]
    counts = [n_out for _, n_out in lengths]
    work.run(prompts[:64], counts[:64])
    elapsed = work.run(prompts, counts)
    rate = sum(counts) / elapsed
    print(
        f"mixed-512: {rate:,.0f} output tok/s in {elapsed:.2f} s, vLLM {VLLM_MIXED[shape]:,}: {rate / VLLM_MIXED[shape]:.2f}×",
        flush=True,
    )


def prefix(work: Work, shape: str) -> None:
    work.run(workloads.shared_prefix(910), [64] * 256, share=True)
    elapsed = [work.run(workloads.shared_prefix(920 + 2 * i), [64] * 256, share=True) for i in range(3)]
    print(
        f"shared prefix, caching on: {statistics.median(elapsed):.3f} s, vLLM {VLLM_PREFIX_S.get(shape, '–')}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["1b"], choices=sorted(workloads.SHAPES))
    parser.add_argument("--work", nargs="*", default=["decode", "prefill", "ttft", "mixed", "prefix"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()
    for shape in args.shape:
        with tempfile.TemporaryDirectory() as directory:
            model = workloads.write_model_dir(shape, Path(directory))
            config = resolve(
                {"model": str(model), "load_format": "dummy", "enforce_eager": args.eager or None}, {}
            ).config
            start = time.perf_counter()
            assembled = assemble(config, lambda stage, done, total: None)
        facts = assembled.facts
        print(
            f"\n## {shape} on {facts.device}, {facts.dtype}, {facts.num_blocks} KV blocks, loaded in {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        work = Work(assembled)
        gc.collect()
        gc.freeze()
        runs = {"prefill": prefill, "ttft": ttft, "mixed": mixed, "prefix": prefix}
        if "decode" in args.work:
            decode(work, shape, args.batch)
        for name in args.work:
            if name in runs:
                runs[name](work, shape)
        del work, assembled
        gc.unfreeze()
        gc.collect()


if __name__ == "__main__":
    main()
