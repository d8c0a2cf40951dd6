"""Our service through gRPC against transformers' `generate`, same weights, same machine, same run.

    python -m benchmarks.versus_transformers [--model demo|1b] [--output-tokens N]

One stream, then 16 concurrent ones, 64 ids in, N out, greedy, EOS ignored; output tokens per second of wall time from
the first request to the last token, prefill and the wire included. transformers runs one request at a time, then the 16
as one batch (they are equally long, so that it pads nothing), with its own defaults, on the same device and with the
same number of threads. The 1b model has Llama-3.2-1B's shape in bfloat16 and random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import workloads
from benchmarks.saved import add_save_flag, saved
from benchmarks.service import serving
from photon_grpc import demo
from photon_grpc.cli.load.load import Session, Turn, Workload, run_load, summarize

PROMPT_TOKENS = 64


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(10, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def ours(address: str, asked: list[list[int]], num_tokens: int) -> float:
    """Output tokens per second of all requests started together, ids out."""
    sessions = [Session([Turn(prompt, num_tokens)]) for prompt in asked]
    summary = summarize(asyncio.run(run_load(Workload(address, sessions, text=False))))
    if summary.failed or summary.output_tokens != num_tokens * len(asked):
        raise RuntimeError(f"{summary.output_tokens} tokens instead of {num_tokens * len(asked)}; {summary.failures}")
    return summary.output_tokens_per_s


def theirs(directory: Path, asked: list[list[int]], num_tokens: int, repeats: int) -> tuple[float, float]:
    """transformers in a process of its own, (one at a time, all in a batch); NaN where that fails, as where it is not
    installed."""
    command = [sys.executable, "-m", "benchmarks.versus_transformers", "--reference", str(directory)]
    question = json.dumps({"prompts": asked, "num_tokens": num_tokens, "repeats": repeats})
    done = subprocess.run(command, input=question, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return math.nan, math.nan
    single, batch = done.stdout.split()[-2:]
    return float(single), float(batch)


def reference(directory: str) -> None:
    """The other process: prints output tokens per second of `generate`, of two prompts one after the other and of all
    in one batch."""
    import torch
    from transformers import AutoModelForCausalLM

    question = json.load(sys.stdin)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device).eval()
    options = {
        "max_new_tokens": question["num_tokens"],
        "min_new_tokens": question["num_tokens"],
        "do_sample": False,
        "pad_token_id": 0,
    }

    def rate(batches: list[list[list[int]]]) -> float:
        start = time.perf_counter()
        for batch in batches:
            ids = torch.tensor(batch, device=device)
            # The ids are read, or a device would still be computing them.
            model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()
        return sum(map(len, batches)) * question["num_tokens"] / (time.perf_counter() - start)

    with torch.inference_mode():
        for batches in ([[prompt] for prompt in question["prompts"][:2]], [question["prompts"]]):
            print(statistics.median([rate(batches) for _ in range(question["repeats"] + 1)][1:]))


def compare(name: str, directory: Path, vocab_size: int, num_tokens: int, repeats: int) -> str:
    asked = prompts(16, vocab_size)
    # Prompts differ from run to run, or the prefix cache would answer for the prefill.
    with serving("--model", str(directory), "--no-enable-prefix-caching") as address:
        ours(address, asked, 4)
        one = statistics.median(ours(address, asked[:1], num_tokens) for _ in range(repeats))
        many = statistics.median(ours(address, asked, num_tokens) for _ in range(repeats))
    single, batch = theirs(directory, asked, num_tokens, repeats)
    return (
        f"| {name} | {single:,.0f} | {one:,.0f} | {one / single:.2f}× | "
        f"{batch:,.0f} | {many:,.0f} | {many / batch:.2f}× |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "1b"), nargs="*", default=["demo", "1b"])
    parser.add_argument("--output-tokens", type=int, default=0, help="default: 128 for demo, 24 for 1b")
    parser.add_argument("--repeats", type=int, default=3)
    add_save_flag(parser)
    parser.add_argument("--reference", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reference:
        reference(args.reference)
        return
    with saved(args.save):
        table(args)


def table(args: argparse.Namespace) -> None:
    print(f"{PROMPT_TOKENS} ids in, greedy; output tokens per second, median of {args.repeats}\n")
    print("| model | transformers, 1 | ours, 1 stream | ratio | transformers, batch of 16 | ours, 16 streams | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as directory:
        for name in args.model:
            if name == "demo":
                row = compare("embedded, float32", demo.TARGET, 4000, args.output_tokens or 128, args.repeats)
            else:
                model = workloads.write_model_dir("1b", Path(directory))
                workloads.write_weights("1b", model)
                row = compare("Llama-3.2-1B shape, bfloat16", model, 128000, args.output_tokens or 24, args.repeats)
            print(row, flush=True)


if __name__ == "__main__":
    main()
