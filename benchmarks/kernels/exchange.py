"""The exchange of sums between the GPUs of ranks: its time beside NCCL's, and many exchanges with random delays.

    python -m benchmarks.kernels.exchange [--ranks 2] [--rows 1 8 64 8192] [--exchanges 1000000]

Starts a process for every further GPU. Times are those of one of 64 exchanges in a CUDA graph, on planes in turns, with
the addition to the residual stream: `planes` by memory that the GPUs write to each other (and the sums of squares),
`nccl` by an all-gather and a kernel that adds, `shared` by a kernel that adds a rank's rows, which are handed on.
Bytes are those of a rank's part. The second table has sums behind their product, as layers have them: the product
alone, with the exchange while it is made in pieces of so many rows, if two ranks do so, and with `shared` behind it.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from photon_grpc.bridge.heartbeat import shared_file
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import exchange, slices
from photon_grpc.layers.epilogues import Parts
from photon_grpc.layers.parallel.group import MeshSizes
from photon_grpc.layers.parallel.planes import Planes
from photon_grpc.layers.parallel.processes import SHARED_ROWS, Joined, ProcessGroup, ProcessMesh

PartOf = Callable[[slice], torch.Tensor]
HIDDEN, CALLS = 4096, 64
PIECES = (512, 1024, 2048)


def captured(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, replays: int = 30) -> float:
    """Return the median time of a call in the graph."""
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return sorted(times[5:])[len(times[5:]) // 2]


def timed(group: Joined, planes: Planes, device: torch.device, rows: Sequence[int], rank: int) -> None:
    for num_rows in rows:
        h = torch.zeros(num_rows, HIDDEN, dtype=torch.bfloat16, device=device)
        part = torch.randn(num_rows, HIDDEN, device=device)
        squares = torch.empty(num_rows, HIDDEN // 16, device=device)

        def by_planes(h: torch.Tensor = h, part: torch.Tensor = part, squares: torch.Tensor = squares) -> None:
            for call in range(CALLS):
                planes.add(h, Parts(part.__getitem__), None, squares, call % 2)

        def by_nccl(h: torch.Tensor = h, part: torch.Tensor = part) -> None:
            for _ in range(CALLS):
                slices.add_launch(h, group.gather(part), None)

        def by_group(h: torch.Tensor = h, part: torch.Tensor = part, squares: torch.Tensor = squares) -> None:
            for call in range(CALLS):
                group.add(h, Parts(part.__getitem__), None, squares, call % 2)

        ways = [by_planes if planes.take(h) else None, by_nccl, by_group if num_rows >= SHARED_ROWS else None]
        found = [f"{microseconds(captured(way)):.2f}" if way else "" for way in ways]
        if rank == 0:
            print(f"| {num_rows} | {part.nbytes >> 10} KB | {' | '.join(found)} |", flush=True)


def behind_products(alone: Joined, planes: Planes, device: torch.device, rank: int) -> None:
    """Time sums of many rows with the products of an output and of a down projection of a rank of an 8B model."""
    lengths = PIECES if planes.piece_rows else ()
    if rank == 0:
        sizes = "".join(f" {rows} rows a piece |" for rows in lengths)
        print(f"\n| rows | K | product, µs |{sizes} shared |\n|--:|--:|--:|{'--:|' * len(lengths)}--:|", flush=True)
    own = [size // alone.size for size in (4096, 14336)]
    for num_rows, k in [(num_rows, k) for num_rows in (2048, 8192) for k in own]:
        h = torch.zeros(num_rows, HIDDEN, dtype=torch.bfloat16, device=device)
        x, w = (torch.randn(size, k, device=device).bfloat16() for size in (num_rows, HIDDEN))
        squares = torch.empty(num_rows, HIDDEN // 16, device=device)

        def part(rows: slice, x: torch.Tensor = x, w: torch.Tensor = w) -> torch.Tensor:
            return torch.mm(x[rows], w.t(), out_dtype=torch.float32)

        def product(part: PartOf = part) -> None:
            for _ in range(CALLS):
                part(slice(None))

        def summed(group: Planes | Joined, h: torch.Tensor = h, part: PartOf = part, s: torch.Tensor = squares) -> None:
            for call in range(CALLS):
                group.add(h, Parts(part), None, s, call % 2)

        found = [microseconds(captured(product), 15)]
        for planes.piece_rows in lengths:
            found.append(microseconds(captured(partial(summed, planes)), 15))
        found.append(microseconds(captured(partial(summed, alone)), 15))
        if rank == 0:
            print(f"| {num_rows} | {k} | {' | '.join(f'{each:.1f}' for each in found)} |", flush=True)


def compare(group: Joined, device: torch.device, rank: int) -> None:
    """Tell whether rows that ranks share out have the bits of those that all add."""
    for num_rows in (exchange.NUM_PUSHED + 1, SHARED_ROWS, 4099):
        generator = torch.Generator(device=device).manual_seed(num_rows)
        parts = torch.randn(group.size, num_rows, HIDDEN, device=device, generator=generator)
        start = torch.randn(num_rows, HIDDEN, device=device, generator=generator).bfloat16()
        found, expected = start.clone(), start.clone()
        sums = torch.empty(num_rows, HIDDEN // 16, device=device)
        for site in (0, 1):
            group.add(found, Parts(parts[rank].__getitem__), None, sums, site)
            slices.add_launch(expected, parts, None)
        equal = torch.equal(found, expected) and torch.equal(sums, squares.reference(expected))
        print(f"rank {rank}: {num_rows} rows equal: {equal}", flush=True)


def delayed(planes: Planes, device: torch.device, num_exchanges: int, rank: int, size: int) -> None:
    """Exchange numbers that all ranks know, each rank late at random; count wrong ones."""
    num_rows, generator = 4, torch.Generator(device=device).manual_seed(7)
    base = torch.randint(-999, 999, (size, CALLS, num_rows, HIDDEN), generator=generator, device=device).float()
    total, h = base.sum(0), torch.zeros(CALLS, num_rows, HIDDEN, device=device)
    squares = torch.empty(num_rows, HIDDEN // 16, device=device)
    turn, wrong = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)

    def exchange() -> None:
        turn.add_(1).remainder_(1000)
        h.zero_()
        parts = base[rank] * turn
        for call in range(CALLS):
            planes.add(h[call], Parts(parts[call].__getitem__), None, squares, call % 2)
        wrong.add_((h != total * turn).sum())

    graph, chance = captured(exchange), random.Random(rank)
    for number in range(num_exchanges // CALLS):
        if chance.random() < 0.5:
            torch.cuda._sleep(chance.randrange(100_000))
        graph.replay()
        if number % 500 == 0:
            torch.cuda.synchronize()
    print(f"rank {rank}: {num_exchanges} exchanges with random delays, {int(wrong)} wrong words", flush=True)


def bounded(planes: Planes, device: torch.device, rank: int, looks: int = 1_000_000) -> None:
    """Tell how long rank 0 looks for parts of a rank that sends none. Its device is lost then."""
    exchange.LOOKS = looks
    h, part, sums = (torch.zeros(1, size, device=device) for size in (HIDDEN, HIDDEN, HIDDEN // 16))
    for site in (0, 1):
        planes.add(h, Parts(part.__getitem__), None, sums, site)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank:
        time.sleep(8)
        return
    begun_s = time.perf_counter()
    try:
        planes.add(h, Parts(part.__getitem__), None, sums, 0)
        torch.cuda.synchronize()
    except Exception as error:
        took_s = time.perf_counter() - begun_s
        print(f"gave up after {took_s:.2f} s of {looks:,} looks: {type(error).__name__}", flush=True)


def run(rank: int, file: int, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = ProcessMesh(rank, MeshSizes(args.ranks), file)
    mesh.join(device, HIDDEN)
    assert isinstance(mesh.mesh.tp, ProcessGroup)
    group = mesh.mesh.tp._group
    assert isinstance(group, Joined) and group._planes is not None, "the GPUs do not reach each other"
    if rank == 0:
        print(f"\n{torch.cuda.get_device_name()}\n\n| rows | bytes | planes, µs | nccl, µs | shared, µs |")
        print("|--:|--:|--:|--:|--:|", flush=True)
    alone = Joined(rank, args.ranks, group._group)
    timed(alone, group._planes, device, args.rows, rank)
    if args.products:
        behind_products(alone, group._planes, device, rank)
    compare(group, device, rank)
    delayed(group._planes, device, args.exchanges, rank, args.ranks)
    bounded(group._planes, device, rank)
    # The end of NCCL's group may wait for graphs.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 32, 64, 128, 256, 2048, 8192])
    parser.add_argument("--exchanges", type=int, default=1_000_000)
    parser.add_argument("--products", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0, help="of a process for a further GPU")
    parser.add_argument("--file", type=int, help="of such a process: the number of the shared file")
    args = parser.parse_args()
    if not args.rank:
        args.file = shared_file("rendezvous")
        for rank in range(1, args.ranks):
            own = "--rank", str(rank), "--file", str(args.file)
            command = [sys.executable, "-m", "benchmarks.kernels.exchange", *sys.argv[1:], *own]
            subprocess.Popen(command, pass_fds=(args.file,))
    run(args.rank, args.file, args)


if __name__ == "__main__":
    main()
