"""Fits the constants of `kernels/linear/cost.py` to two sweeps, and says how far its choices are from the best.

    python -m benchmarks.kernels.fit benchmarks/results/sweep_h200.jsonl benchmarks/results/chain_sweep_h200.jsonl

Those of the library to its times alone (`sweep.py`), those of tiles to what a layer gains by them over the library
(`chain_sweep.py`): squared logarithmic error, weighted towards the best of each product, coordinate descent from the
constants as they are. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from photon_grpc.kernels.linear import cost
from photon_grpc.kernels.linear.cost import LIBRARY, TILES, Product
from photon_grpc.kernels.linear.tiles import Tile

#: Of a library's launch between kernels of ours that overlap, microseconds beside those that it takes among its like.
GAP_US = 2.0


class Case(NamedTuple):
    """A product in a layer of a shape: µs of the library among its like; µs of a layer with the library; for each tile
    what it gains over that, negative."""

    shape: str
    product: Product
    library_us: float
    layer_us: float
    gains: dict[Tile, float]


def read_library(path: Path) -> dict[Product, float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {Product(*line["product"]): line["library"] for line in lines}


def read_cases(path: Path, library: dict[Product, float]) -> list[Case]:
    found = []
    for line in path.read_text().splitlines():
        read = json.loads(line)
        product, layer_us = Product(*read["product"]), read["library"]
        considered = set(cost.candidates(product))
        gains = {Tile(*tile): us - layer_us for us, *tile in read["tiles"] if Tile(*tile) in considered}
        alone = library.get(product) or cost.library_us(product) - GAP_US
        found.append(Case(read["shape"], product, alone, layer_us, gains))
    return [case for case in found if case.gains]


def fitted(start: Any, error: Callable[[Any], float], rounds: int) -> Any:
    """Fit by coordinate descent over a NamedTuple of numbers and of tuples of them."""
    best, least = start, error(start)
    steps = dict.fromkeys(_places(start), 0.2)
    for _ in range(rounds):
        for place in steps:
            for factor in (1 + steps[place], 1 / (1 + steps[place])):
                trial = _scaled(best, place, factor)
                found = error(trial)
                if found < least:
                    best, least, steps[place] = trial, found, steps[place] * 1.2
                    break
            else:
                steps[place] *= 0.6
    return best


def _places(constants: Any) -> list[tuple[str, int | None]]:
    found: list[tuple[str, int | None]] = []
    for name, value in constants._asdict().items():
        found += [(name, i) for i in range(len(value))] if isinstance(value, tuple) else [(name, None)]
    return found


def _scaled(constants: Any, place: tuple[str, int | None], factor: float) -> Any:
    name, i = place
    value = getattr(constants, name)
    if i is None:
        return constants._replace(**{name: value * factor})
    return constants._replace(**{name: (*value[:i], value[i] * factor, *value[i + 1 :])})


def tile_error(cases: list[Case]) -> Callable[[Any], float]:
    points = []
    for case in cases:
        library_us, best = case.library_us + GAP_US, min(case.gains.values())
        for tile, gain in case.gains.items():
            weight = math.exp(-8 * (gain - best) / library_us)
            points.append((case.product, tile, max(0.5, library_us + gain), weight))
    total = sum(weight for *_, weight in points)

    def error(constants: Any) -> float:
        return sum(w * math.log(cost.tile_us(t, p, constants=constants) / us) ** 2 for p, t, us, w in points) / total

    return error


def library_error(library: dict[Product, float]) -> Callable[[Any], float]:
    def error(constants: Any) -> float:
        return sum(math.log(cost.library_us(p, constants) / us) ** 2 for p, us in library.items()) / len(library)

    return error


def report(cases: list[Case]) -> None:
    """Print by bucket how much longer a layer takes with the choices than with the best that was timed."""
    behind: dict[tuple[int, str], float] = defaultdict(float)
    for case in cases:
        chosen = cost.choose(case.product)
        if chosen is not None and chosen not in case.gains:
            print(f"{case.shape} {tuple(case.product)}: {chosen} was not timed")
            continue
        took, best = case.gains[chosen] if chosen else 0.0, min(0.0, *case.gains.values())
        behind[case.product.rows, case.shape] += (took - best) / case.layer_us
        if took > best + 1.0:
            print(f"{case.shape} {tuple(case.product)}: {chosen or 'library'} {took:+.1f} µs, best {best:+.1f}")
    for rows in sorted({rows for rows, _ in behind}):
        shares = [share for (at, _), share in behind.items() if at == rows]
        print(f"rows {rows}: {100 * sum(shares) / len(shares):.1f} % on average, {100 * max(shares):.1f} % at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("chains", type=Path)
    parser.add_argument("--rounds", type=int, default=50, help="0: only say how good the constants are")
    arguments = parser.parse_args()
    library = read_library(arguments.sweep)
    cases = read_cases(arguments.chains, library)
    alone = LIBRARY._replace(start=LIBRARY.start - GAP_US)
    ours, theirs = tile_error(cases), library_error(library)
    tiles, alone = fitted(TILES, ours, arguments.rounds), fitted(alone, theirs, arguments.rounds)
    print(tiles, alone._replace(start=alone.start + GAP_US), sep="\n")
    print(
        f"relative error: {100 * ours(tiles) ** 0.5:.1f} % of tiles, {100 * theirs(alone) ** 0.5:.1f} % of the library"
    )
    report(cases)


if __name__ == "__main__":
    main()
