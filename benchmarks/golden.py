"""Records what every kind of step computes, as digests, so that two trees can be compared bit for bit on one device.

    PYTHONPATH=OTHER_TREE python -P benchmarks/golden.py --out before.json
    PYTHONPATH=. python -P benchmarks/golden.py --out after.json
    python -m benchmarks.golden --compare before.json after.json

The results of a kind of device are kept in results/golden.json, shortened to one digest per kind of step, with the
numerics version that gave them (docs/numerics.md):

    python -m benchmarks.golden --record     # writes those of this device
    python -m benchmarks.golden --check      # computes them again, fails if any differs

Random weights, random pages. For every bucket of rows and of tokens, each sampling level, as graphs and eagerly: the
ids sampled, and the keys and values that the step wrote in every layer. For every bucket of rows also the head's logits
of fixed hidden states.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.engine import config_of
from photon_grpc.compose.assemble import Assembled, assemble
from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.numerics import NO_NUMERICS, Numerics
from photon_grpc.core.request import SamplingParams

KEPT = Path(__file__).with_name("results") / "golden.json"
_LENGTH = 16
NUM_BLOCKS = 3000
BLOCK_SIZE = 64
MAX_BLOCKS_A_ROW = 10
DECODE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
#: (tokens, rows) of steps with a prompt: alone, beside few rows, beside many.
MIXED = tuple(
    (tokens, rows)
    for rows, sizes in (
        (1, (32, 128, 512, 1024, 2048, 2500)), (7, (60, 250, 500)), (40, (90, 300, 2000)), (200, (256, 700, 2040, 3000))
    )
    for tokens in sizes
)  # fmt: skip
LEVELS = ("plain", "filtered", "shaped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=("1b", "8b", "qwen3"), default=("1b", "8b", "qwen3"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--record", action="store_true", help="keep the digests of this kind of device")
    parser.add_argument("--check", action="store_true", help="compare with those that are kept")
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*options.compare))
    digests, numerics = compute(options.shape)
    text = json.dumps(digests, indent=0)
    if options.out:
        options.out.write_text(text)
    print(f"{len(digests)} digests, all of them: {hashlib.sha256(text.encode()).hexdigest()[:16]}")
    device = torch.cuda.get_device_name()
    if options.record:
        record(device, numerics, shortened(digests))
    if options.check:
        sys.exit(check(device, numerics, shortened(digests)))


def compute(shapes: Sequence[str]) -> tuple[dict[str, str], Numerics]:
    """The digest of every case, and the numerics that gave them, which are the same for all shapes."""
    digests, found = {}, NO_NUMERICS
    for shape in shapes:
        for mode in ("graphs", "eager"):
            for case, digest, numerics in cases(shape, mode):
                digests[f"{shape} {mode} {case}"] = digest
                found = numerics
    return digests, found


def shortened(digests: dict[str, str]) -> dict[str, str]:
    """One digest per shape, launch, kind of step and level: `1b graphs decode plain`."""
    groups: dict[str, list[str]] = {}
    for case, digest in sorted(digests.items()):
        words = [word for word in case.split() if not word.isdigit()]
        groups.setdefault(" ".join(words), []).append(f"{case} {digest}")
    return {name: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_LENGTH] for name, lines in groups.items()}


def kept() -> dict[str, Any]:
    """Device -> its numerics version and its digests by group."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def record(device: str, numerics: Numerics, digests: dict[str, str]) -> None:
    """Keep the digests of a device; those of other shapes stay if they are of the same version."""
    entries = kept()
    before = entries.get(device, {})
    same = before.get("digests", {}) if before.get("numerics_version") == numerics.version else {}
    parts = {name: getattr(numerics, name) for name in ("number", "libraries", "device")}
    entries[device] = {"numerics_version": numerics.version, **parts, "digests": same | digests}
    KEPT.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def check(device: str, numerics: Numerics, digests: dict[str, str]) -> int:
    """Print the groups that differ from those kept; return 1 if there are any, or none to compare with."""
    entry = kept().get(device)
    if entry is None:
        print(f"nothing is kept for {device}: --record")
        return 1
    if entry["numerics_version"] != numerics.version:
        print(f"kept are those of numerics {entry['numerics_version']}, this is {numerics.version}: --record")
        return 1
    differing = [name for name, digest in digests.items() if entry["digests"].get(name) != digest]
    print(f"{len(digests)} groups, {len(differing)} differ from those kept", *differing, sep="\n  ")
    return int(bool(differing))


def compare(before: Path, after: Path) -> int:
    """Print the cases that differ; return 1 if there are any."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    differing = [case for case in old.keys() | new.keys() if old.get(case) != new.get(case)]
    print(f"{len(old)} and {len(new)} digests, {len(differing)} differ")
    for case in sorted(differing)[:60]:
        print(" ", case)
    return int(bool(differing))


def cases(shape: str, mode: str) -> Iterator[tuple[str, str, Numerics]]:
    """(case, digest, numerics) of a shape, as graphs or eagerly."""
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model", str(_model_dir(shape, Path(directory))), "--load-format", "dummy", "--dtype", "bfloat16"]
        flags += ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "256"]
        flags += ["--enforce-eager"] if mode == "eager" else []
        assembled = assemble(config_of(flags), lambda stage, done, total: None)
    for case, digest in _all_cases(assembled):
        yield case, digest, assembled.facts.numerics
    assembled.runner.close()
    del assembled
    gc.collect()
    torch.cuda.empty_cache()


def _all_cases(assembled: Assembled) -> Iterator[tuple[str, str]]:
    steps = Steps(assembled.runner, assembled.facts.vocab_size)
    for level in LEVELS:
        for rows in DECODE_ROWS:
            yield from steps.decode(rows, level)
        for tokens, rows in MIXED:
            yield from steps.mixed(tokens, rows, level)
    yield from head_digests(assembled.facts.vocab_size)


class Steps:
    """Batches of fresh rows over pages of random numbers."""

    def __init__(self, runner: Any, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._pages: torch.Tensor = runner.cache.pages[0]
        generator = torch.Generator(self._pages.device).manual_seed(7)
        for block in self._pages:
            block.normal_(0.0, 0.5, generator=generator)
        self._step = 0
        self._seated: tuple[int, ...] = ()

    def decode(self, num_rows: int, level: str) -> Iterator[tuple[str, str]]:
        rows = self._rows([1] * num_rows, level)
        yield f"admit {num_rows} {level}", self._compute(rows, [1] * num_rows, admit=True)
        yield f"decode {num_rows} {level}", self._compute(rows, [1] * num_rows, admit=False)

    def mixed(self, num_tokens: int, num_rows: int, level: str) -> Iterator[tuple[str, str]]:
        counts = [num_tokens - num_rows + 1] + [1] * (num_rows - 1)
        yield f"mixed {num_tokens} {num_rows} {level}", self._compute(self._rows(counts, level), counts, admit=True)

    def _rows(self, counts: Sequence[int], level: str) -> list[Admission]:
        """As many rows, each about to compute its count of tokens behind some that are computed."""
        rng = random.Random(f"{counts[0]} {len(counts)} {level}")
        blocks = iter(rng.sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS))
        rows = []
        for number, count in enumerate(counts):
            length = count + rng.choice((0, 1, 63, 64, 200, 500)) if count > 1 else rng.randint(1, 600)
            num_blocks = (length + 2) // BLOCK_SIZE + 1
            rows.append(
                Admission(
                    slot=number + 1,
                    ids=tuple(rng.randrange(self._vocab_size) for _ in range(length)),
                    num_prompt=max(1, length - rng.randint(0, 5)),
                    num_computed=length - count,
                    blocks=(tuple(next(blocks) for _ in range(num_blocks)),),
                    sampling=_sampling(rng, number, level),
                    min_tokens=50 if level == "shaped" and number % 3 == 0 else 0,
                    banned_until_min=tuple(range(0, 1000, 7)) if level == "shaped" and number % 3 == 0 else (),
                )
            )
        return rows

    def _compute(self, rows: list[Admission], counts: list[int], *, admit: bool) -> str:
        """One step of these rows; admitted with it, or in the step before."""
        self._step += 1
        slots = tuple(row.slot for row in rows)
        batch = Batch(
            step=self._step,
            slots=slots,
            counts=tuple(counts),
            yields=(1,) * len(rows),
            left=self._seated if admit else (),
            admissions=tuple(rows) if admit else (),
        )
        self._seated = slots
        output = self._runner.submit(batch).result()
        behind = 0 if admit else 1
        digest = hashlib.sha256(repr((output.ids, sorted(output.faults))).encode())
        for row, count in zip(rows, counts, strict=True):
            positions = range(row.num_computed + behind, row.num_computed + behind + count)
            pages = torch.tensor([row.blocks[0][at // BLOCK_SIZE] for at in positions], device=self._pages.device)
            within = torch.tensor([at % BLOCK_SIZE for at in positions], device=self._pages.device)
            written = self._pages[pages, :, :, :, within].contiguous().view(torch.int16)
            digest.update(written.cpu().numpy().tobytes())
        return digest.hexdigest()[:24]


def head_digests(vocab_size: int) -> Iterator[tuple[str, str]]:
    """Of the logits that the loaded decoder makes of fixed hidden states."""
    decoder = next(
        found for found in gc.get_objects() if "Decoder" in type(found).__name__ and hasattr(found, "logits")
    )
    generator = torch.Generator(decoder.device).manual_seed(11)
    hidden = torch.randn(
        256, decoder.norm.weight.shape[0], generator=generator, device=decoder.device, dtype=decoder.dtype
    )
    with torch.inference_mode():
        for rows in DECODE_ROWS:
            logits = decoder.logits(hidden[:rows].clone())
            yield f"logits {rows}", hashlib.sha256(logits[:, :vocab_size].cpu().numpy().tobytes()).hexdigest()[:24]


def _sampling(rng: random.Random, number: int, level: str) -> SamplingParams:
    seed = rng.getrandbits(64)
    if number % 4 == 0:
        return SamplingParams(0.0, seed=seed)
    if level == "filtered":
        return SamplingParams(0.8, top_p=(0.9, 1.0)[number % 2], top_k=(-1, 40)[number % 3 == 0], min_p=0.0, seed=seed)
    return SamplingParams(1.0, seed=seed)


def _model_dir(shape: str, directory: Path) -> Path:
    name = {"qwen3": "qwen3-1.7b"}.get(shape, shape)
    if shape != "1b":
        workloads.SHAPES[name] = workloads.SHAPES[name] | {"num_hidden_layers": 8}
    return workloads.write_model_dir(name, directory)


if __name__ == "__main__":
    main()
