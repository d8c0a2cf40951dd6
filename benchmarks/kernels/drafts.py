"""Time the kernels of steps with drafts on a GPU: accepting the sampled ids, and prompt lookup.

    python -m benchmarks.kernels.drafts [--rows 1 16 64 256] [--known 272 4096]

Microseconds of a launch among others in a CUDA graph.
"""

from __future__ import annotations

import argparse

import torch
from triton.testing import do_bench_cudagraph

from benchmarks.saved import add_save_flag, saved
from photon_grpc.kernels import accept, ngram
from photon_grpc.kernels.slot_state import SlotState

DRAFTS = 3
_LAUNCHES = 50


def state_of(num_rows: int, known: int, room: int = 64) -> SlotState:
    tokens = torch.randint(1, 1000, (num_rows + 1, known + room), dtype=torch.int32, device="cuda")
    numbers = torch.full((num_rows + 1,), known, device="cuda")
    return SlotState(tokens, numbers - 1, torch.zeros(1, 1, 1, dtype=torch.int32, device="cuda"), numbers)


def times_us(num_rows: int, known: int) -> tuple[float, float]:
    """Return microseconds of accept and of prompt lookup."""
    slots, counts = (torch.arange(1, num_rows + 1, device="cuda"), torch.full((num_rows,), DRAFTS + 1, device="cuda"))
    ids = torch.zeros(num_rows * (DRAFTS + 1), dtype=torch.int64, device="cuda")
    drafts = torch.full_like(counts, DRAFTS)
    state = state_of(num_rows, known)

    def accepting() -> None:
        for _ in range(_LAUNCHES):
            accept.launch(slots, counts, counts, ids, state)

    def drafting() -> None:
        for _ in range(_LAUNCHES):
            ngram.launch(slots, drafts, state)

    drafted = do_bench_cudagraph(drafting) * 1e3 / _LAUNCHES
    # Every launch adds an id to every row.
    state = state_of(num_rows, 1, 1 << 18)
    accepted = do_bench_cudagraph(accepting, rep=5) * 1e3 / _LAUNCHES
    return accepted, drafted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--known", type=int, nargs="+", default=[272, 4096])
    add_save_flag(parser)
    args = parser.parse_args()
    with saved(args.save):
        print(f"| rows | known ids | accept of {DRAFTS} drafts, µs | prompt lookup, µs |\n|--:|--:|--:|--:|")
        for num_rows in args.rows:
            for known in args.known:
                accepted, drafted = times_us(num_rows, known)
                print(f"| {num_rows} | {known} | {accepted:.2f} | {drafted:.2f} |", flush=True)


if __name__ == "__main__":
    main()
