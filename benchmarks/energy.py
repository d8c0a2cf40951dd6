"""Joules a token: what the card takes while it decodes, from its own energy counter.

    python -m benchmarks.energy [--shape 1b 8b] [--batch 1 8 64 256] [--seconds 6] [-- FLAGS OF serve]

Random weights; every request greedy, 128 tokens in, 256 out, batch after batch until so many seconds are over; the
prompts' share of the energy is in it. Idle: the card's power with the model loaded and nothing to do. Needs a CUDA
device.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks import workloads
from benchmarks.engine import Work, loaded
from benchmarks.saved import add_save_flag, saved

#: Reads the energy that a card has taken so far, in joules.
Meter = Callable[[], float]
_PROMPT_TOKENS, _OUTPUT_TOKENS = 128, 256


class Taken(NamedTuple):
    """Of a while: seconds, joules, tokens that came out."""

    seconds: float
    joules: float
    num_tokens: int = 0

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


def nvml_meter() -> Meter:
    """Of the first card. Raise SystemExit where there is none, or no NVML, which is part of the driver."""
    try:
        nvml, handle, energy_mj = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_ulonglong()
        uuid = str(torch.cuda.get_device_properties(0).uuid)
    except (OSError, RuntimeError, AssertionError) as error:
        raise SystemExit(f"no energy counter: {error}") from error
    name = (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode()

    def call(function: str, *args: Any) -> None:
        if code := getattr(nvml, function)(*args):
            raise SystemExit(f"no energy counter: {function} gave {code}")

    def joules() -> float:
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(energy_mj))
        return energy_mj.value / 1e3

    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", name, ctypes.byref(handle))
    joules()
    return joules


def idle(meter: Meter, seconds: float) -> Taken:
    begun_s, begun_j = time.perf_counter(), meter()
    time.sleep(seconds)
    return Taken(time.perf_counter() - begun_s, meter() - begun_j)


def decoding(work: Work, meter: Meter, batch: int, seconds: float) -> Taken:
    prompts = [workloads.prompt(930, request, _PROMPT_TOKENS) for request in range(batch)]
    work.run(prompts, [_OUTPUT_TOKENS] * batch)
    begun_s, begun_j, num_tokens = time.perf_counter(), meter(), 0
    while time.perf_counter() - begun_s < seconds:
        work.run(prompts, [_OUTPUT_TOKENS] * batch)
        num_tokens += _OUTPUT_TOKENS * batch
    return Taken(time.perf_counter() - begun_s, meter() - begun_j, num_tokens)


def table(shape: str, batches: list[int], seconds: float, flags: list[str], meter: Meter) -> None:
    with loaded(shape, flags) as work:
        print(f"\nidle: {idle(meter, 2.0).watts:.0f} W\n\n| batch | W | tok/s | J a token |\n|--:|--:|--:|--:|")
        for batch in batches:
            taken = decoding(work, meter, batch, seconds)
            rate, cost_j = taken.num_tokens / taken.seconds, taken.joules / taken.num_tokens
            print(f"| {batch} | {taken.watts:.0f} | {rate:.0f} | {cost_j:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["1b"], choices=[*workloads.SHAPES, "demo"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args()
    meter = nvml_meter()
    with saved(args.save):
        for shape in args.shape:
            table(shape, args.batch, args.seconds, args.flags, meter)


if __name__ == "__main__":
    main()
