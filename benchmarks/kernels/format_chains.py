"""Decode layers of public shapes in every format of their weights, beside 16 bits, as `layer_chains.py` has them.

    python -m benchmarks.kernels.format_chains [--shape qwen3-8b 3b] [--rows 1,8,64] [--format int8-g128] [--joules]

Microseconds a layer; the floor is the bytes of its weights in the format, and of keys and values, over 4.10 TB/s. With
--joules each chain runs for half a second more: millijoules a layer, by the card's own counter.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.energy import Meter, nvml_meter
from benchmarks.kernels.layer_chains import CONTEXT, MAX_LEN, READ_BYTES_PER_US, Steps
from benchmarks.kernels.timing import captured, needs_gpu
from benchmarks.saved import add_save_flag, saved
from benchmarks.shapes import HELD_OUT, SHAPES, layer_bytes, layer_kv_bytes
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import FORMATS
from photon_grpc.config.weight_bytes import linear_bytes
from photon_grpc.kernels import select
from photon_grpc.kernels.lang.precompile import Job, launches_collected, run_in_forks
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import Decoder, build, dummy
from photon_grpc.models.fused import fuse

PLAIN = "16 bits"
ROWS = (1, 8, 16, 64, 256)
#: Bytes of weights in 16 bits that a chain has: more than the second-level cache holds also in 4.
CHAIN_BYTES, MAX_LAYERS = 480 << 20, 16
REPLAYS, ENERGY_S = 25, 0.5


class FormatChain:
    """Layers of a shape with weights in a format, and the steps over them."""

    def __init__(self, shape_name: str, format_name: str, max_rows: int, num_layers: int = 0) -> None:
        shape, form = SHAPES[shape_name], FORMATS.get(format_name)
        layers = num_layers or max(4, min(MAX_LAYERS, -(-CHAIN_BYTES // layer_bytes(shape))))
        sizes = {"num_hidden_layers": layers, "vocab_size": 1024, "tie_word_embeddings": True}
        with TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(shape | sizes))
            config = read_model_dir(Path(directory))
        plain = build(
            config, dtype=torch.bfloat16, device="cuda", kernels=select("triton", "cuda"), max_model_len=MAX_LEN,
            method=methods(form),
        )  # fmt: skip
        dummy(plain)
        self.decoder: Decoder = fuse(plain) or plain
        self.steps = Steps(self.decoder, max_rows)
        self.num_layers, self._shape = layers, shape
        self._bytes = linear_bytes(config, form) / layers

    def floor_us(self, rows: int) -> float:
        return (self._bytes + layer_kv_bytes(self._shape, rows * CONTEXT)) / READ_BYTES_PER_US

    def graph(self, rows: int) -> torch.cuda.CUDAGraph:
        ctx = self.steps.context(self.decoder, rows)
        return captured([lambda: self.steps.run(self.decoder, rows, ctx)])


def layer_us(graph: torch.cuda.CUDAGraph, num_layers: int) -> float:
    """Return the median microseconds of a layer."""
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_layers)
    return sorted(times[1:])[REPLAYS // 2]


def layer_mj(graph: torch.cuda.CUDAGraph, num_layers: int, us: float, meter: Meter) -> float:
    """Return the millijoules of a layer, over `ENERGY_S` seconds of replays."""
    replays = max(1, round(ENERGY_S * 1e6 / (us * num_layers)))
    torch.cuda.synchronize()
    begin, began_s = meter(), time.perf_counter()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    watts = (meter() - begin) / (time.perf_counter() - began_s)
    return watts * us / 1e3


def compile_all(shapes: Sequence[str], names: Sequence[str], all_rows: Sequence[int]) -> None:
    """Compile every kernel of the run, side by side."""
    jobs: list[Job] = []
    for shape in shapes:
        for name in names:
            chain = FormatChain(shape, name, max(all_rows), 1)
            with launches_collected() as found:
                for rows in all_rows:
                    chain.steps.run(chain.decoder, rows, chain.steps.context(chain.decoder, rows))
            jobs += found
    torch.cuda.synchronize()
    done = run_in_forks(jobs, num_workers=os.cpu_count() or 1)
    print(f"{done} of {len(jobs)} kernels compiled\n", flush=True)


def report(shape: str, names: Sequence[str], all_rows: Sequence[int], meter: Meter | None) -> None:
    print(f"\n## {shape}{' (held out)' if shape in HELD_OUT else ''}: µs a layer (floor{', mJ' if meter else ''})\n")
    print(f"| format | {' | '.join(f'{rows} rows' for rows in all_rows)} | slower than 16 bits |")
    print(f"|---|{'--:|' * len(all_rows)}---|")
    plain: dict[int, float] = {}
    for name in names:
        chain, cells, slower = FormatChain(shape, name, max(all_rows)), [], []
        for rows in all_rows:
            graph = chain.graph(rows)
            us = layer_us(graph, chain.num_layers)
            energy = f", {layer_mj(graph, chain.num_layers, us, meter):.1f}" if meter else ""
            cells.append(f"{us:.1f} ({chain.floor_us(rows):.1f}{energy})")
            if us > plain.setdefault(rows, us):
                slower.append(f"{rows}: {100 * (us / plain[rows] - 1):.1f} %")
        print(f"| {name} | {' | '.join(cells)} | {', '.join(slower) or '–'} |", flush=True)
        del chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["8b", "qwen3-8b"], choices=[*SHAPES])
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--format", nargs="*", default=[*FORMATS], choices=[*FORMATS])
    parser.add_argument("--joules", action="store_true")
    add_save_flag(parser)
    arguments = parser.parse_args()
    needs_gpu("benchmarks.kernels.format_chains")
    all_rows = [int(rows) for rows in arguments.rows.split(",")]
    # 16 bits twice: what the difference of the two is, is noise.
    names = [PLAIN, *arguments.format, PLAIN]
    with saved(arguments.save), torch.inference_mode():
        compile_all(arguments.shape, [PLAIN, *arguments.format], all_rows)
        meter = nvml_meter() if arguments.joules else None
        for shape in arguments.shape:
            report(shape, names, all_rows, meter)


if __name__ == "__main__":
    main()
