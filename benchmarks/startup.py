"""From `photon-grpc serve` to ready and to the first token through gRPC, with cold and with warm caches of compiled
kernels.

    python -m benchmarks.startup [--shape 1b] [--weights dummy|file] [--repeats 3] [-- FLAGS OF serve]

Cold: Triton's and CUDA's caches are empty directories of this run; warm: the same again, the median of the repeats.
    ready: the health service says SERVING, asked every 20 ms; first token: of a request of 16 ids sent then. The stages
    are those that loading reports, seen from the engine alone in one more warm run. `--weights file` writes random
    weights as safetensors first (they stay in the page cache: a disk is not measured); dummy makes them on the device.
    Interpreter and libraries are in the page cache, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import grpc

from benchmarks import service, workloads
from benchmarks.saved import add_save_flag, saved
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc

_READY_S = 400.0
_RESULT = "RESULT "


def measure(flags: Sequence[str], caches: dict[str, str]) -> tuple[float, float, list[str]]:
    """(seconds to ready, to the first token, what the service said and when)."""
    address = service.free_address()
    said: list[str] = []
    begun_s = time.perf_counter()
    process = service.start(address, *flags, environment=caches, stderr=subprocess.PIPE)
    assert process.stderr is not None
    listener = threading.Thread(target=_listen, args=(process.stderr, begun_s, said))
    listener.start()
    try:
        service.wait_until_ready(address, process, _READY_S)
        ready_s = time.perf_counter() - begun_s
        _first_token(address)
        first_s = time.perf_counter() - begun_s
        num_said = len(said)
    except BaseException:
        print("\n".join(said), file=sys.stderr)
        raise
    finally:
        service.stop(process)
        listener.join()
    return ready_s, first_s, said[:num_said]


def _listen(lines: IO[str], begun_s: float, said: list[str]) -> None:
    said.extend(f"{time.perf_counter() - begun_s:6.2f} s  {line.rstrip()}" for line in lines)


def _first_token(address: str) -> None:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(token % 4000 for token in workloads.prompt(960, 0, 16))
    request.stop.max_tokens = 2
    request.stop.ignore_eos = True
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        for _ in inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request, timeout=_READY_S):
            return


def engine_stages(flags: Sequence[str]) -> None:
    """A process of its own: says how long libraries, weights and warm-up took, as loading reports them."""
    begun_s = time.perf_counter()
    from benchmarks.engine import config_of
    from photon_grpc.compose.assemble import assemble

    imported_s = time.perf_counter()
    seen: dict[str, list[float]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        seen.setdefault(stage, []).append(time.perf_counter())

    assemble(config_of(flags), progress)
    ended_s = time.perf_counter()
    marks = [("libraries", begun_s), ("device and model", imported_s)]
    marks += [(stage, times[0]) for stage, times in seen.items()]
    ends = [*(start for _, start in marks[1:]), ended_s]
    print(_RESULT + json.dumps({name: end - start for (name, start), end in zip(marks, ends, strict=True)}), flush=True)


def stages(flags: Sequence[str], caches: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.startup", "--stages", "--", *flags]
    done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, timeout=_READY_S)
    found = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    return json.loads(found[-1].removeprefix(_RESULT)) if found else {}


@contextlib.contextmanager
def model_flags(shape: str, weights: str) -> Iterator[list[str]]:
    with service.model_flags(shape) as flags:
        if weights == "file" and flags:
            begun_s = time.perf_counter()
            workloads.write_weights(shape, Path(flags[1]))
            print(f"(weights written in {time.perf_counter() - begun_s:.1f} s)", flush=True)
            flags = flags[:2]
        yield flags


def table(flags: Sequence[str], repeats: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        caches = {"TRITON_CACHE_DIR": f"{directory}/triton", "CUDA_CACHE_PATH": f"{directory}/cuda"}
        print("\n| caches | ready s | first token s |\n|---|--:|--:|")
        ready_s, first_s, cold_said = measure(flags, caches)
        print(f"| cold | {ready_s:.2f} | {first_s:.2f} |", flush=True)
        warm = [measure(flags, caches) for _ in range(repeats)]
        medians = (statistics.median(run[column] for run in warm) for column in (0, 1))
        print("| warm | " + " | ".join(f"{seconds:.2f}" for seconds in medians) + " |", flush=True)
        print("\n| stage, warm | s |\n|---|--:|")
        for stage, seconds in stages(flags, caches).items():
            print(f"| {stage} | {seconds:.2f} |")
        for name, said in (("cold", cold_said), ("warm", warm[-1][2])):
            print(f"\n{name}:\n\n```\n" + "\n".join(said) + "\n```", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=[*workloads.SHAPES, "demo"])
    parser.add_argument("--weights", default="dummy", choices=["dummy", "file"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stages", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args()
    if args.stages:
        engine_stages(args.flags)
        return
    with saved(args.save), model_flags(args.shape, args.weights) as flags:
        print(f"{args.shape}, weights: {'its own' if args.shape == 'demo' else args.weights}", flush=True)
        table([*flags, *args.flags], args.repeats)


if __name__ == "__main__":
    main()
