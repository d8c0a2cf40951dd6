"""The whole service over loopback: streaming, text out, client processes apart; the named serving workloads.

    python -m benchmarks.serve [--shape 1b] [--work closed] [--concurrency 1 16 64 256] [--clients 8] [-- FLAGS OF
    serve] python -m benchmarks.serve --work all [--scale 0.05] python -m benchmarks.serve --target ADDR ...
    python -m benchmarks.serve --api grpc http [-- --frontends 4]

`closed` is the one that other servers were measured with: C slots, each 4 requests one after another, all slots start
together; 128 ids in, 128 tokens out, text and greedy, EOS ignored; the median of three runs after one that warms up, no
run shares a prompt with another. The others are defined in benchmarks/traffic.py and run once, after a run at a quarter
of their size. TTFT: send to the first message with a token; gap: between messages; TPOT: first message to last, over
the tokens after the first. The front end's µs are those of its process, for a service of this machine. With
--multiplex a client process has one stream for all its requests, with --logprobs every request asks for scores. Random
weights and a tokenizer of random words. With --target a service that already runs is loaded instead. With --api http
the same is sent over HTTP (`/v1/completions`, server-sent events); with both, row beside row to one service.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks import traffic, workloads
from benchmarks.saved import add_save_flag, saved
from benchmarks.service import free_address, frontend_cpu_s, model_flags, serving, vocab_size
from photon_grpc.cli.load.load import (
    GRPC_CLIENT,
    Percentiles,
    RequestResult,
    Session,
    Summary,
    Workload,
    run_load,
    summarize,
)

#: tok/s of vLLM 0.24.0 on one H200, measured apart from this run: its gRPC (ids only) and its Rust HTTP server.
VLLM_1B = {1: (660, 765), 16: (8_100, 9_800), 64: (21_600, 29_000), 256: (40_000, 57_000)}
_REQUEST_TIMEOUT_S = 300.0
HTTP_CLIENT = "benchmarks.http_client"
APIS = ("grpc", "http")


class Clients:
    """Sends loads to one service, and takes nothing but complete answers."""

    def __init__(
        self,
        target: str,
        num_processes: int,
        *,
        http_target: str = "",
        multiplex: bool = False,
        text: bool = True,
        logprobs: int | None = None,
    ) -> None:
        """Load the service at `target`, through its HTTP API if that is named."""
        self.target = target
        self._http_target = http_target
        self._multiplex = multiplex
        self._text = text
        self._logprobs = logprobs
        self._num_processes = num_processes
        self._vocab_size = vocab_size(target)
        self._runs = 0

    def next_run(self) -> int:
        self._runs += 1
        return self._runs

    def send(self, sessions: Sequence[Session]) -> list[RequestResult]:
        """Raises RuntimeError unless every request brought all its tokens."""
        load = Workload(
            target=self._http_target or self.target,
            sessions=traffic.within(sessions, self._vocab_size),
            # What an earlier run has left in the cache of a service that goes on is not found.
            salt=f"benchmark-{time.time_ns()}",
            timeout_s=_REQUEST_TIMEOUT_S,
            multiplex=self._multiplex,
            text=self._text,
            logprobs=self._logprobs,
        )
        client = HTTP_CLIENT if self._http_target else GRPC_CLIENT
        answers = asyncio.run(run_load(load, self._num_processes, client_module=client))
        summary = summarize(answers)
        for reason, failures in summary.failures.items():
            raise RuntimeError(f"{failures.count} requests failed with {reason}: {failures.message}")
        expected = sum(turn.output_tokens for session in sessions for turn in session.turns)
        if summary.output_tokens != expected:
            raise RuntimeError(f"{summary.output_tokens} tokens came, {expected} were asked for")
        return answers


def closed(apis: Mapping[str, Clients], concurrencies: Sequence[int], *, has_peer: bool) -> None:
    print(
        "\n| requests | api | tok/s | TTFT p50 / p99 ms | message gap p50 / p99 ms "
        "| tokens a message | front end µs a token | vLLM gRPC / Rust HTTP |"
    )
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    for concurrency in concurrencies:
        peer = " / ".join(f"{rate:,}" for rate in VLLM_1B.get(concurrency, ())) if has_peer else ""
        for api, clients in apis.items():
            print(f"| {concurrency} | {api} | {_closed(clients, concurrency)} | {peer or '–'} |", flush=True)


def _closed(clients: Clients, concurrency: int) -> str:
    clients.send(traffic.closed(clients.next_run(), concurrency))
    before_s = frontend_cpu_s(clients.target)
    runs = [summarize(clients.send(traffic.closed(clients.next_run(), concurrency))) for _ in range(3)]
    cpu_s = frontend_cpu_s(clients.target) - before_s
    return (
        f"{statistics.median(run.output_tokens_per_s for run in runs):,.0f} | "
        f"{_median([run.ttft_s for run in runs], 1)} | {_median([run.gap_s for run in runs], 2)} | "
        f"{statistics.median(run.tokens_per_message for run in runs):.2f} | "
        f"{cpu_s / sum(run.output_tokens for run in runs) * 1e6:.1f}"
    )


def _median(runs: Sequence[Percentiles], digits: int) -> str:
    p50, p99 = statistics.median(run.p50 for run in runs), statistics.median(run.p99 for run in runs)
    return f"{p50 * 1e3:.{digits}f} / {p99 * 1e3:.{digits}f}"


def others(clients: Clients, names: Sequence[str], scale: float) -> None:
    print(
        "\n| workload | requests | tok/s | TTFT p50 / p90 / p99 ms | TPOT p50 / p99 ms "
        "| request p50 / p99 s | cached | sent late p99 ms |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    remarks: list[str] = []
    for name in names:
        work = traffic.TRAFFIC[name]
        clients.send(work.make(clients.next_run(), (work.rates or (1.0,))[0], scale / 4))
        for rate in work.rates or (1.0,):
            label = f"{name}, {rate * scale:g}/s" if work.rates else name
            try:
                answers = clients.send(work.make(clients.next_run(), rate, scale))
            except RuntimeError as error:
                print(f"| {label} | failed: {error} | | | | | | |", flush=True)
                continue
            print(_row(label, summarize(answers)), flush=True)
            if name == "agent":
                remarks.append(sessions_of_agents(answers))
    remarks += [f"{name}: {traffic.TRAFFIC[name].meaning}" for name in names]
    print("".join(f"\n* {remark}" for remark in remarks))


def _row(label: str, summary: Summary) -> str:
    ttft, tpot, total = summary.ttft_s, summary.tpot_s, summary.total_s
    return (
        f"| {label} | {summary.completed} | {summary.output_tokens_per_s:,.0f} | "
        f"{ttft.p50 * 1e3:.1f} / {ttft.p90 * 1e3:.1f} / {ttft.p99 * 1e3:.1f} | "
        f"{tpot.p50 * 1e3:.2f} / {tpot.p99 * 1e3:.2f} | "
        f"{total.p50:.3f} / {total.p99:.3f} | {summary.cached_prompt_tokens / summary.prompt_tokens:.0%} | "
        f"{summary.late_s.p99 * 1e3:.1f} |"
    )


def sessions_of_agents(answers: Sequence[RequestResult]) -> str:
    """Turn latency, session time, and how much of the history was found in the cache."""
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    for answer in answers:
        starts[answer.session] = min(answer.sent_s, starts.get(answer.session, answer.sent_s))
        ends[answer.session] = max(answer.sent_s + answer.total_s, ends.get(answer.session, 0.0))
    session = Percentiles.of([ends[number] - starts[number] for number in ends])
    turn = Percentiles.of([answer.total_s for answer in answers])
    later = [answer for answer in answers if answer.turn]
    history = sum(answer.prompt_tokens for answer in later) - 64 * len(later)
    hits = sum(answer.cached_prompt_tokens for answer in later) / history if history else 0.0
    return (
        f"agents: turn p50 / p99 {turn.p50 * 1e3:.1f} / {turn.p99 * 1e3:.1f} ms, "
        f"session p50 / p99 {session.p50:.3f} / {session.p99:.3f} s, "
        f"{hits:.1%} of the history cached from the second turn on"
    )


def measure(target: str, http_target: str, args: argparse.Namespace) -> None:
    addresses = {"grpc": "", "http": http_target}
    apis = {
        api: Clients(
            target,
            args.clients,
            http_target=addresses[api],
            multiplex=args.multiplex,
            text=not args.ids,
            logprobs=args.logprobs,
        )
        for api in args.api
    }
    if "closed" in args.work:
        closed(apis, args.concurrency, has_peer=args.shape == "1b" and not args.target)
    names = [name for name in args.work if name in traffic.TRAFFIC]
    for api, clients in apis.items() if names else ():
        print(f"\n{api}:")
        others(clients, names, args.scale)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*workloads.SHAPES, "demo"], default="1b")
    parser.add_argument("--work", nargs="*", default=["closed"], choices=["closed", *traffic.TRAFFIC, "all"])
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 16, 64, 256], help="of closed")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the other workloads' rates and numbers of requests"
    )
    parser.add_argument("--clients", type=int, default=8, help="client processes, at most one a stream")
    parser.add_argument("--multiplex", action="store_true", help="one stream a client process, for all its requests")
    parser.add_argument("--ids", action="store_true", help="ask for ids instead of text")
    parser.add_argument("--paced", action="store_true", help="no model: steps take as long as those of 1b on an H200")
    parser.add_argument("--logprobs", type=int, metavar="N", help="ask for scores, and those of the N best")
    parser.add_argument("--api", nargs="+", choices=APIS, default=["grpc"], help="what the requests are sent through")
    parser.add_argument("--target", metavar="ADDR", help="a service that already runs")
    parser.add_argument("--http-target", metavar="ADDR", help="its HTTP API, for --api http")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args(argv)
    args.work = ["closed", *traffic.TRAFFIC] if "all" in args.work else args.work
    if "http" in args.api:
        if args.multiplex or args.ids or "agent" in args.work:
            parser.error("--multiplex, --ids and the workload agent need --api grpc: they use what only gRPC has")
        if bool(args.target) != bool(args.http_target):
            parser.error("--api http: set both --target and --http-target, or neither")
    return args


def main() -> int:
    args = arguments()
    with saved(args.save):
        scale = "" if args.scale == 1 else f", scale {args.scale:g}"
        streams = ", one stream each" if args.multiplex else ""
        streams += ", ids" if args.ids else ", text"
        streams += ", paced" if args.paced else ""
        streams += "" if args.logprobs is None else f", logprobs {args.logprobs}"
        flags = " ".join(args.flags) or "none"
        print(f"{args.shape}, {args.clients} client processes{streams}{scale}; flags: {flags}", flush=True)
        if args.target:
            measure(args.target, args.http_target, args)
            return 0
        program = "benchmarks.paced_engine" if args.paced else "photon_grpc"
        http_target = free_address() if "http" in args.api else ""
        api = ["--http-listen", http_target] if http_target else []
        with model_flags(args.shape) as flags, serving(*flags, *api, *args.flags, program=program) as target:
            measure(target, http_target, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
