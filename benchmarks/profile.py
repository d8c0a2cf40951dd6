"""Show where a step's time goes: a named workload under torch.profiler, a kernel table, and a trace for Perfetto.

    python -m benchmarks.profile [--shape 1b] [--work decode] [--batch 64] [--steps 32] [--trace FILE.json.gz] [-- FLAGS
    OF serve]

decode: so many steps of `batch` sequences, well after their prompts (with drafts: steps that verify them); prefill:
    prompts of 2048 tokens, one token out; mixed: the first `batch` requests of mixed-512, whole. On CUDA the table
    shows what ran on the device, also inside graphs, else operators by the time of their own on the CPU. Where launches
    depend on each other programmatically, kernels overlap and their waiting counts: shares may add up to more than the
    wall. Open the trace at ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import workloads
from benchmarks.engine import Work, loaded
from benchmarks.saved import add_save_flag, saved

#: First match wins; what a kernel's or an operator's name says it is for.
GROUPS = (
    (
        "sampling",
        r"logprob|threshold_kernel|process_kernel|count_kernel|bins_kernel|tally|window_kernel|list_kernel"
        r"|sampl|noise|gumbel|argmax|topk|softmax|sort|logits",
    ),
    (
        "experts",
        r"gate_up_kernel|down_(alone_)?kernel|segment8?_kernel|\bgather_kernel|scores_kernel|choose_kernel|route_one_kernel"
        r"|\bsum_kernel",
    ),
    (
        "attention",
        r"latent_(ring_)?kernel|query_kernel|value_kernel|attention|attn|flash|fmha|sdpa|varlen|decode_kernel|merge_kernel",
    ),
    (
        "fused projections",
        r"gemv_kernel|wgmma8?_kernel|wide(8|16)?_kernel|many_rows|quantize_rows|rescale|fused_linear|gemv|add_slices",
    ),
    (
        "matrix products",
        r"gemm|nvjet|cutlass|cublas|matmul|splitk|aten::(add)?mm|aten::linear|aten::bmm|mkldnn|dequantize",
    ),
    ("norm, rotary, SwiGLU", r"norm|rotary|rotate|rope|swiglu|geglu|silu|gelu|squares"),
    ("KV write, embedding", r"write_kv|embed|index_put|index_copy"),
    ("exchange", r"push_kernel|take_kernel|exchange_kernel|nccl"),
    ("drafts", r"accept_kernel|ngram_kernel|keep_rows_kernel"),
    ("slots and inputs", r"admit_kernel|_inputs|advance|slot|searchsorted|cumsum|gather|index|where|scan"),
    ("copies", r"memcpy|memset|copy|aten::to\b|aten::cat|CatArray"),
)


class Row(NamedTuple):
    name: str
    calls: int
    us: float


def decode(work: Work, batch: int, steps: int) -> Callable[[], int]:
    """Run steps in the middle of the answers."""
    prompts = [workloads.prompt(900, request, 128) for request in range(batch)]
    work.submit(prompts, [(1 + work.facts.max_drafts) * steps + 32] * batch)
    while work.num_tokens < 8 * batch:
        work.step()

    def measured() -> int:
        for _ in range(steps):
            work.step()
        return steps

    return measured


def prefill(work: Work, batch: int, steps: int) -> Callable[[], int]:
    prompts = [workloads.prompt(901, request, 2048) for request in range(batch)]
    work.run(prompts[:1], [1])
    return lambda: _steps_of(work, prompts, [1] * batch)


def mixed(work: Work, batch: int, steps: int) -> Callable[[], int]:
    lengths = workloads.mixed_512()[:batch]
    prompts = [workloads.prompt(903, request, n_in) for request, (n_in, _) in enumerate(lengths)]
    counts = [n_out for _, n_out in lengths]
    work.run(prompts, counts)
    return lambda: _steps_of(work, prompts, counts)


WORK = {"decode": decode, "prefill": prefill, "mixed": mixed}


def _steps_of(work: Work, prompts: list[tuple[int, ...]], counts: list[int]) -> int:
    work.run(prompts, counts)
    return len(work.step_times_s)


def record(measured: Callable[[], int], trace: Path, *, on_cuda: bool) -> tuple[list[Row], int, float]:
    """Return (what ran, steps, seconds) and write the trace."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    if on_cuda:
        # The first profile of a process loads CUPTI, which takes seconds.
        with profile(activities=activities):
            torch.zeros(1, device="cuda").add_(1)
            torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        begun_s = time.perf_counter()
        steps = measured()
        if on_cuda:
            torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - begun_s
    profiler.export_chrome_trace(str(trace))
    return (device_rows(trace) if on_cuda else operator_rows(profiler)), steps, elapsed_s


def device_rows(trace: Path) -> list[Row]:
    """From the trace itself: its categories are the same in every version of torch."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    on_device = ("kernel", "gpu_memcpy", "gpu_memset")
    return rows_of((event["name"], float(event["dur"])) for event in events if event.get("cat") in on_device)


def operator_rows(profiler: Any) -> list[Row]:
    rows = [Row(event.key, event.count, event.self_cpu_time_total) for event in profiler.key_averages()]
    return sorted((row for row in rows if row.us), key=lambda row: -row.us)


def rows_of(events: Iterable[tuple[str, float]]) -> list[Row]:
    """Return the rows, longest first; kernels whose names differ only in template arguments are one."""
    calls: dict[str, int] = {}
    us: dict[str, float] = {}
    for name, duration_us in events:
        short = short_name(name)
        calls[short] = calls.get(short, 0) + 1
        us[short] = us.get(short, 0.0) + duration_us
    return sorted((Row(name, calls[name], us[name]) for name in us), key=lambda row: -row.us)


def short_name(name: str) -> str:
    """Return `elementwise_kernel` for `void at::native::elementwise_kernel<128, ...>(int, ...)`.

    The functor is added if one says more.
    """
    functor = re.search(r"(\w*Functor\w*|\w+_kernel_cuda|\w+Ops?|cutlass_\w+)\b", name.partition("<")[2])
    plain = re.sub(r"<.*", "", name.removeprefix("void ")).partition("(")[0].rpartition("::")[2].strip() or name
    return f"{plain} {functor.group(1)}" if functor and functor.group(1) != plain else plain


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


def tables(rows: list[Row], steps: int, elapsed_s: float, top: int, where: str) -> None:
    total_us = sum(row.us for row in rows) or 1.0
    print(
        f"\n{steps} steps of {elapsed_s / steps * 1e3:.3f} ms (wall, profiled), of which "
        f"{total_us / steps / 1e3:.3f} ms {where} "
        f"({total_us / elapsed_s / 1e6:.0%})"
    )
    print("\n| group | calls a step | µs a step | share |\n|---|--:|--:|--:|")
    groups: dict[str, Row] = {}
    for row in rows:
        group = groups.get(group_of(row.name), Row(group_of(row.name), 0, 0.0))
        groups[group.name] = Row(group.name, group.calls + row.calls, group.us + row.us)
    for row in sorted(groups.values(), key=lambda row: -row.us):
        print(f"| {row.name} | {row.calls / steps:.1f} | {row.us / steps:.1f} | {row.us / total_us:.1%} |")
    print("\n| kernel | group | calls a step | µs a call | µs a step | share |\n|---|---|--:|--:|--:|--:|")
    for row in rows[:top]:
        print(
            f"| `{row.name[:70]}` | {group_of(row.name)} | {row.calls / steps:.1f} | {row.us / row.calls:.2f} | "
            f"{row.us / steps:.1f} | {row.us / total_us:.1%} |"
        )
    if len(rows) > top:
        rest = sum(row.us for row in rows[top:])
        print(f"| {len(rows) - top} more | | | | {rest / steps:.1f} | {rest / total_us:.1%} |")


def measure(args: argparse.Namespace, trace: Path) -> None:
    with loaded(args.shape, args.flags) as work:
        measured = WORK[args.work](work, args.batch, args.steps)
        on_cuda = work.facts.device != "cpu"
        rows, steps, elapsed_s = record(measured, trace, on_cuda=on_cuda)
        while work.num_open:
            work.step()
    print(f"\n{args.work}, batch {args.batch}")
    tables(rows, steps, elapsed_s, args.top, "on the device" if on_cuda else "in operators")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=[*workloads.SHAPES, "demo"])
    parser.add_argument("--work", default="decode", choices=list(WORK))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32, help="of decode")
    parser.add_argument("--top", type=int, default=25, help="kernels shown")
    parser.add_argument("--trace", type=Path, metavar="FILE", help=".json or .json.gz; unset: thrown away")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args()
    with saved(args.save), tempfile.TemporaryDirectory() as directory:
        measure(args, args.trace or Path(directory) / "trace.json")
        if args.trace:
            print(f"\ntrace: {args.trace} ({args.trace.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
