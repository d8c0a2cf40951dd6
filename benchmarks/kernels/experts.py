"""Experts: routing, products and sums of one layer, and other tiles for the products.

    python -m benchmarks.kernels.experts [--shape qwen3-30b-a3b] [--rows 1 8 64 2048] [--format fp8] [--sweep]

Random tokens and routers, so nearly uniform routing; layers are taken in turn, so that no weight is in the cache. All
kernels are compiled side by side before the first is timed. Of 8 bits times of products include the rounding of rows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from benchmarks.kernels.timing import measure_us
from benchmarks.workloads import SHAPES
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.precompile import launches_collected, run_in_forks
from photon_grpc.kernels.linear.fused_linear import ResidualStream
from photon_grpc.kernels.linear.quantize import LIMITS
from photon_grpc.kernels.moe import experts, route
from photon_grpc.kernels.moe.experts import ProductTile
from photon_grpc.kernels.moe.route import RouterForm, Routing
from photon_grpc.kernels.moe.stacks import Stack, Stacks

NUM_LAYERS = 3
EIGHT = {"fp8": torch.float8_e4m3fn, "fp8-block": torch.float8_e4m3fn, "w8a8": torch.int8}
#: Pairs at a time -> (rows of W of gate and of up, columns, warps, steps in flight) to try; down has twice the rows.
CANDIDATES = {
    16: [
        *product((16, 32), (128, 256), (4,), (3, 4, 6)),
        (16, 64, 4, 6),
        (32, 64, 4, 6),
        (16, 128, 2, 4),
        (32, 128, 8, 4),
    ],
    32: [*product((16, 32, 64), (128,), (4,), (3, 4)), (32, 64, 4, 6), (64, 64, 8, 4)],
    64: [*product((32, 64), (64, 128), (4, 8), (3,)), (64, 64, 4, 4), (32, 64, 4, 4)],
    128: [*product((32, 64), (64,), (4, 8), (3, 4)), (128, 64, 8, 3), (64, 128, 8, 2), (128, 32, 8, 4)],
}


class Layers:
    """Random layers of a shape on the device, in 16 bits or in a format of 8 bits of weights and activations."""

    def __init__(self, shape: str, form: str = "") -> None:
        self.form_of_weights = form
        config = SHAPES[shape]
        self.hidden, self.top_k = config["hidden_size"], config.get("num_experts_per_tok", 2)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        routed = next(config[name] for name in names if name in config)
        self.size = config.get("moe_intermediate_size") or config["intermediate_size"]
        self.form = RouterForm(self.top_k, num_shared=config.get("n_shared_experts", 0))
        self.top_k += self.form.num_shared
        self.num_experts = routed + self.form.num_shared
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self.routers = [torch.randn(routed, self.hidden, **options) for _ in range(NUM_LAYERS)]
        self.stacks = [self._stacks(options) for _ in range(NUM_LAYERS)]

    def _stacks(self, options: dict[str, object]) -> Stacks:
        gate_up = torch.randn(self.num_experts, 2 * self.size, self.hidden, **options).mul_(self.hidden**-0.5)
        down = torch.randn(self.num_experts, self.hidden, self.size, **options).mul_(self.size**-0.5)
        return Stacks(self._stack(gate_up), self._stack(down))

    def _stack(self, weight: torch.Tensor) -> Stack:
        if not self.form_of_weights:
            return Stack(weight)
        experts, n, k = weight.shape
        kind = EIGHT[self.form_of_weights]
        shape = (experts, k // 128, n // 128) if self.form_of_weights == "fp8-block" else (experts, 1, n)
        scale, limit = 2.0**-12 if kind.is_floating_point else 2.0**-10, LIMITS[kind]
        values = (weight / scale).clamp_(-limit, limit).to(kind)
        return Stack(values, torch.full(shape, scale, device=weight.device), is_eight=True)


class Step:
    """A step of so many rows through the layers, `block` pairs at a time."""

    def __init__(self, layers: Layers, rows: int, block: int) -> None:
        self.layers, self.rows, self.block = layers, rows, block
        self.x = torch.randn(rows, layers.hidden, dtype=torch.bfloat16, device="cuda")
        self.routings = [self.route(router) for router in layers.routers]
        self.gate_up, self.down = experts.products_of(self.x, self.routings[0], layers.stacks[0])
        self.y = [
            self.gate_up(self.x, routing, stacks.gate_up)
            for routing, stacks in zip(self.routings, layers.stacks, strict=True)
        ]
        self.z = [
            self.down(y, routing, stacks.down)
            for y, routing, stacks in zip(self.y, self.routings, layers.stacks, strict=True)
        ]
        h = torch.randn_like(self.x)
        self.stream = ResidualStream(h, squares.reference(h))

    def route(self, router: torch.Tensor) -> Routing:
        return route.launch(self.x, router, self.layers.form, None, block=self.block)

    @property
    def touched(self) -> float:
        return sum(len(routing.experts.unique()) for routing in self.routings) / NUM_LAYERS

    def calls(self, part: str, tile: ProductTile | None = None) -> list[Callable[[], object]]:
        gate_up = partial(experts.gate_up_launch, tile=tile) if tile else self.gate_up
        down = partial(experts.down_launch, tile=tile) if tile else self.down
        parts: dict[str, Callable[[int], object]] = {
            "route": lambda n: self.route(self.layers.routers[n]),
            "gate_up": lambda n: gate_up(self.x, self.routings[n], self.layers.stacks[n].gate_up),
            "down": lambda n: down(self.y[n], self.routings[n], self.layers.stacks[n].down),
            "sum": lambda n: experts.sum_launch(self.z[n], self.routings[n], torch.empty_like(self.x), None),
            "all": self._all,
        }
        return [partial(parts[part], n) for n in range(NUM_LAYERS)]

    def _all(self, number: int) -> object:
        """Route, multiply, and add to the residual stream."""
        return experts.launch(self.x, self.route(self.layers.routers[number]), self.layers.stacks[number], self.stream)


def blocks_of(layers: Layers, rows: int, *, sweeps: bool) -> tuple[int, ...]:
    block = experts.block_of(rows * layers.top_k, torch.bfloat16, layers.stacks[0]) or route.block_of(rows)
    others = {16: (), 32: (16,), 64: (128,), 128: (64,)}[block]
    return (block, *others) if sweeps else (block,)


def candidates(step: Step) -> Iterator[tuple[str, ProductTile]]:
    for bn, bk, warps, stages in CANDIDATES[step.block]:
        yield "gate_up", ProductTile(bn, bk, warps, stages)
        yield "down", ProductTile(2 * bn, bk, warps, stages)
        if step.block == 16 and bn == 16:
            yield "down", ProductTile(16, bk, warps, stages)


def compile_all(layers: Layers, rows: list[int], *, sweeps: bool) -> None:
    """Compile all that will be timed; a candidate that does not fit is skipped when it is timed."""
    with launches_collected() as jobs:
        for number in rows:
            for block in blocks_of(layers, number, sweeps=sweeps):
                step = Step(layers, number, block)
                for part in ("route", "gate_up", "down", "sum", "all"):
                    step.calls(part)[0]()
                for part, tile in candidates(step) if sweeps else ():
                    step.calls(part, tile)[0]()
    run_in_forks(jobs[::-1], num_workers=os.cpu_count() or 1)


def show(step: Step) -> None:
    layers, device, touched = step.layers, step.x.device, step.touched
    found = {part: measure_us(step.calls(part), device) for part in ("route", "gate_up", "down", "sum", "all")}
    of_expert = 2 * layers.size * layers.hidden
    flops = 2 * 3 * step.rows * layers.top_k * layers.size * layers.hidden
    num_bytes = touched * of_expert // 2 * layers.stacks[0].down.values.element_size()
    rates = [2 * num_bytes / found["gate_up"] / 1e6, num_bytes / found["down"] / 1e6]
    print(
        f"| {step.rows} | {step.block} | {touched:.1f} | "
        + " | ".join(f"{found[part]:.1f}" for part in found)
        + f" | {rates[0]:.2f} / {rates[1]:.2f} | {flops / (found['gate_up'] + found['down']) / 1e6:.0f} |",
        flush=True,
    )


def sweep(step: Step, shown: int = 5) -> None:
    times: dict[str, list[tuple[float, str]]] = {"gate_up": [], "down": []}
    for part, tile in candidates(step):
        try:
            taken = measure_us(step.calls(part, tile), step.x.device, repeats=3)
            times[part].append((taken, "/".join(map(str, tile))))
        except Exception as error:
            times[part].append((float("inf"), f"{tuple(tile)} {type(error).__name__}"))
    for part, found in times.items():
        best = ", ".join(f"{name} {taken:.1f}" for taken, name in sorted(found)[:shown])
        print(f"rows {step.rows} block {step.block} {part}: {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=[s for s in SHAPES if "experts" in str(SHAPES[s])])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 2048])
    parser.add_argument("--format", default="", choices=list(EIGHT), help="weights and activations of 8 bits")
    parser.add_argument("--sweep", action="store_true", help="time other tiles, too")
    args = parser.parse_args()
    layers = Layers(args.shape, args.format)
    compile_all(layers, args.rows, sweeps=args.sweep)
    print("| rows | block | experts | route us | gate_up | down | sum | all | TB/s | TFLOP/s |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    steps = [Step(layers, rows, block) for rows in args.rows for block in blocks_of(layers, rows, sweeps=args.sweep)]
    for step in steps:
        show(step)
    for step in steps if args.sweep else ():
        sweep(step)


if __name__ == "__main__":
    main()
