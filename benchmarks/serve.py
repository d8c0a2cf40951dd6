"""The whole service over loopback: closed loop, streaming, client processes apart.

    python -m benchmarks.serve [--shape 1b] [--concurrency 1 16 64 256] [--clients 8] [--target ADDR] [-- FLAGS OF serve]

C slots, each 4 requests one after another, all slots start together; 128 ids in, 128 tokens out, text and greedy, EOS ignored. TTFT: send to the
first message with a token; gap: between messages. Random weights and a tokenizer of random words. With --target an already running service is
loaded instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from benchmarks import workloads
from benchmarks.service import machine, serving
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc

REQUESTS_PER_SLOT = 4
PROMPT_TOKENS = OUTPUT_TOKENS = 128
#: tok/s of vLLM 0.24.0 on one H200, measured apart from this run: its gRPC (ids only) and its Rust HTTP server.
VLLM_1B = {1: (660, 765), 16: (8_100, 9_800), 64: (21_600, 29_000), 256: (40_000, 57_000)}


def write_tokenizer(directory: Path, vocab_size: int = 128256) -> None:
    """256 bytes, random words of 2-7 letters, 256 specials; no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    draw = random.Random(7)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < vocab_size - 256:
        words["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 7)))] = None
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|special_{number}|>", special=True) for number in range(256)])
    tokenizer.save(str(directory / "tokenizer.json"))


def _prompt(request: int, stream: int, vocab: int) -> list[int]:
    ids = workloads.prompt(950 + stream, request, PROMPT_TOKENS)
    return [token % vocab for token in ids] if vocab else list(ids)


async def load(target: str, slots: list[int], concurrency: int, start_at: float, vocab: int) -> dict[str, Any]:
    """One client process: its slots' requests, and when what came."""
    gaps: list[float] = []
    first: list[float] = []
    tokens = 0
    async with grpc.aio.insecure_channel(target, [("grpc.max_concurrent_streams", 1000)]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await channel.channel_ready()

        async def slot(number: int) -> None:
            nonlocal tokens
            for turn in range(REQUESTS_PER_SLOT):
                request = inference_pb2.GenerateRequest()
                request.token_ids.ids.extend(_prompt(number * 8 + turn, concurrency, vocab))
                request.sampling.temperature = 0.0
                request.stop.max_tokens = OUTPUT_TOKENS
                request.stop.ignore_eos = True
                request.cache.bypass_prefix_cache = True
                last = time.perf_counter()
                received = 0
                async for message in stub.StreamGenerate(request):
                    now = time.perf_counter()
                    (gaps if received else first).append(now - last)
                    last, received = now, received + 1
                    tokens += message.usage.output_tokens

        await asyncio.sleep(max(0.0, start_at - time.time()))
        started = time.time()
        await asyncio.gather(*(slot(number) for number in slots))
    return {"tokens": tokens, "start": started, "end": time.time(), "first": first, "gaps": gaps}


def measure(target: str, concurrency: int, num_clients: int, vocab: int) -> dict[str, float]:
    num_clients = min(num_clients, concurrency)
    start_at = time.time() + 1.5 + 0.2 * num_clients
    processes = []
    for client in range(num_clients):
        slots = list(range(client, concurrency, num_clients))
        order = json.dumps(
            {"target": target, "slots": slots, "concurrency": concurrency, "start_at": start_at, "vocab": vocab}
        )
        command = [sys.executable, "-m", "benchmarks.serve", "--client", order]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    answers = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    first = sorted(t for answer in answers for t in answer["first"])
    gaps = sorted(t for answer in answers for t in answer["gaps"])
    tokens = sum(answer["tokens"] for answer in answers)
    expected = concurrency * REQUESTS_PER_SLOT * OUTPUT_TOKENS
    if tokens != expected:
        raise RuntimeError(f"{tokens} tokens came, {expected} were asked for")
    elapsed = max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers)
    return {
        "rate": tokens / elapsed,
        "ttft_p50": statistics.median(first) * 1e3,
        "ttft_p99": first[int(len(first) * 0.99)] * 1e3,
        "gap_p50": statistics.median(gaps) * 1e3 if gaps else 0.0,
        "gap_p99": gaps[int(len(gaps) * 0.99)] * 1e3 if gaps else 0.0,
        "tokens_per_message": tokens / (len(first) + len(gaps)),
    }


def table(target: str, concurrencies: list[int], num_clients: int, vocab: int) -> None:
    print(
        "| streams | tok/s | TTFT p50 / p99 ms | message gap p50 / p99 ms | tokens a message | vLLM gRPC / Rust HTTP |"
    )
    print("|--:|--:|--:|--:|--:|--:|")
    for concurrency in concurrencies:
        measure(target, concurrency, num_clients, vocab)
        runs = [measure(target, concurrency, num_clients, vocab) for _ in range(3)]
        m = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        peer = " / ".join(f"{rate:,}" for rate in ({} if vocab else VLLM_1B).get(concurrency, ())) or "–"
        print(
            f"| {concurrency} | {m['rate']:,.0f} | {m['ttft_p50']:.1f} / {m['ttft_p99']:.1f} | "
            f"{m['gap_p50']:.2f} / {m['gap_p99']:.2f} | {m['tokens_per_message']:.2f} | {peer} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*workloads.SHAPES, "demo"], default="1b")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--target")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    args = parser.parse_args()
    if args.client:
        print(json.dumps(asyncio.run(load(**json.loads(args.client)))))
        return
    # Ids of the workload that the embedded model's vocabulary holds.
    vocab = 4000 if args.shape == "demo" else 0
    print(f"{machine()}; {args.clients} client processes; flags: {' '.join(args.flags) or 'none'}\n", flush=True)
    if args.target:
        table(args.target, args.concurrency, args.clients, vocab)
        return
    with tempfile.TemporaryDirectory() as directory:
        flags = list(args.flags)
        if args.shape != "demo":
            model = workloads.write_model_dir(args.shape, Path(directory))
            write_tokenizer(model)
            flags += ["--model", str(model), "--load-format", "dummy"]
        with serving(*flags) as target:
            table(target, args.concurrency, args.clients, vocab)


if __name__ == "__main__":
    main()
