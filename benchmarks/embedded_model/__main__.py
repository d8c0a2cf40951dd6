"""`python -m benchmarks.embedded_model --corpus FILE --out DIRECTORY`: trains the embedded models, writes their card.

The corpus is what `python -m benchmarks.embedded_model.corpus` built. Everything, evaluation included, is done within
--minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from .card import Trained, card_text
from .corpus import Corpus, read
from .evaluate import evaluate
from .llama import Llama, LlamaShape, num_parameters
from .loop import FitOptions, fit, windows
from .packages import read_packages
from .release import agreement, check_against_transformers, machine_name, round_to_bf16, save_model
from .tokenizer import encode_documents, render_document, train_tokenizer

# The target and the draft together stay below 16 MB in bf16; sizes divide by 128 so that quantization groups fit.
SHAPES = {
    "teacher": LlamaShape(512, 1408, num_layers=8, num_heads=8, num_kv_heads=4),
    "target": LlamaShape(256, 640, num_layers=8, num_heads=8, num_kv_heads=4),
    "draft": LlamaShape(128, 384, num_layers=2, num_heads=4, num_kv_heads=2),
}
# For trying the script on a CPU.
TINY_SHAPES = {name: LlamaShape(128, 128, num_layers=1, num_heads=4, num_kv_heads=2) for name in SHAPES}
# `share` of the time for training. The target learns from the data alone unless --teacher: see docs/decisions.
STAGES: dict[str, dict[str, float]] = {
    "teacher": {"share": 0.5, "learning_rate": 3e-3, "weight_decay": 0.1},
    "target": {"share": 0.8, "learning_rate": 5e-3, "weight_decay": 0.1, "teacher_weight": 0.6},
    "draft": {"share": 0.2, "learning_rate": 8e-3, "weight_decay": 0.05, "teacher_weight": 0.9},
}
# Kept of --minutes for the evaluation and the card.
EVALUATION_SHARE = 0.15
MAX_TOKENIZER_CHARS = 60_000_000
MAX_HELD_OUT_WINDOWS = 256


@dataclass(frozen=True)
class Run:
    """What one training run was asked for, and what it reads."""

    arguments: argparse.Namespace
    started: float
    device: torch.device
    corpus: Corpus
    tokenizer: Tokenizer

    @property
    def training_ends_at(self) -> float:
        return self.started + 60 * self.arguments.minutes * (1 - EVALUATION_SHARE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedded_model", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where target/, draft/ and MODEL_CARD.md go")
    parser.add_argument("--minutes", type=float, default=7.5, help="for everything")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="use torch.compile where it works")
    parser.add_argument(
        "--teacher", action="store_true", help="train a larger model first, which the target learns from"
    )
    parser.add_argument("--before", type=Path, help="figures of other models that evaluate.py wrote, for the card")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens a step, a multiple of 4096")
    parser.add_argument("--tiny", action="store_true", help="models of no use, to try the script")
    return parser.parse_args()


def main() -> None:
    arguments, started = parse_arguments(), time.monotonic()
    device = torch.device(arguments.device)
    print(f"reading the corpus, training the tokenizer ({machine_name(device)})", flush=True)
    corpus = read(arguments.corpus)
    run = Run(arguments, started, device, corpus, train_tokenizer(_sample(corpus.files, MAX_TOKENIZER_CHARS)))
    documents = encode_documents(run.tokenizer, corpus.documents)
    print(f"{len(corpus.files):,} files, {len(documents):,} documents, {time.monotonic() - started:.0f} s", flush=True)
    held_out = _held_out_windows(run)
    models, stages = _train_stages(run, documents, held_out)
    figures = {name: evaluate(arguments.out / name, corpus.held_out, device) for name in ("target", "draft")}
    (arguments.out / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    _write_card(run, models, stages, figures, held_out)


def _sample(files: list[str], max_chars: int) -> Iterator[str]:
    """Every n-th file, so that all packages have their share in at most about `max_chars`."""
    yield from files[:: max(1, round(sum(map(len, files)) / max_chars))]


def _held_out_windows(run: Run) -> torch.Tensor:
    sources = [source for part in run.corpus.held_out.values() for source in part]
    documents = encode_documents(run.tokenizer, [render_document(source) for source in sources])
    every = windows(documents, 1024, run.device)
    return every[:: max(1, len(every) // MAX_HELD_OUT_WINDOWS)]


def _train_stages(run: Run, documents: list[np.ndarray], held_out: torch.Tensor) -> tuple[dict[str, Llama], list[str]]:
    """The teacher if asked for, target, draft, each learning from the one before it; saves the last two when ready."""
    models: dict[str, Llama] = {}
    summaries: list[str] = []
    previous: Llama | None = None
    stages = {name: stage for name, stage in STAGES.items() if name != "teacher" or run.arguments.teacher}
    share_left = sum(stage["share"] for stage in stages.values())
    for name, stage in stages.items():
        print(f"{name}:", flush=True)
        torch.manual_seed(run.arguments.seed)
        model = Llama((TINY_SHAPES if run.arguments.tiny else SHAPES)[name]).to(run.device)
        now = time.monotonic()
        ends_at = now + (run.training_ends_at - now) * stage["share"] / share_left
        share_left -= stage["share"]
        summary = fit(model, documents, held_out, _fit_options(run.arguments, stage, ends_at), previous)
        summaries.append(f"* {name}: {num_parameters(model):,} parameters, {summary}{_taught_by(models, stage)}")
        round_to_bf16(model)
        if name != "teacher":
            save_model(model, run.tokenizer, run.arguments.out / name)
        models[name] = previous = model.eval()
    return models, summaries


def _taught_by(models: dict[str, Llama], stage: dict[str, float]) -> str:
    """For the card: the share of the loss that comes from the newest of `models`; empty for the first stage."""
    if not models:
        return ""
    share, teacher = f"{stage['teacher_weight']:.0%}", list(models)[-1]
    return f"; {share} of its loss is the cross\n  entropy to the {teacher}'s probabilities"


def _fit_options(arguments: argparse.Namespace, stage: dict[str, Any], ends_at: float) -> FitOptions:
    options = {key: value for key, value in stage.items() if key != "share"}
    return FitOptions(
        ends_at=ends_at,
        seed=arguments.seed,
        compile=arguments.compile,
        batch_tokens=arguments.batch_tokens,
        **options,
    )


def _write_card(
    run: Run, models: dict[str, Llama], stages: list[str], figures: dict[str, Any], held_out: torch.Tensor
) -> None:
    """Measures the draft's agreement, compares with transformers, and writes the card."""
    arguments, path = run.arguments, run.arguments.out / "MODEL_CARD.md"
    before = json.loads(arguments.before.read_text(encoding="utf-8")) if arguments.before else {}
    trained = Trained(run.corpus, read_packages(), run.tokenizer, models, figures | before)
    equal, overlap = agreement(models["target"], models["draft"], held_out)
    check = check_against_transformers(models["target"], arguments.out / "target")
    minutes = (time.monotonic() - run.started) / 60
    text = card_text(
        trained,
        equal=equal,
        overlap=overlap,
        check=check,
        stages="\n".join(stages),
        # Files by their names: their directories are this machine's.
        command=" ".join(["python -m benchmarks.embedded_model", *(Path(word).name for word in sys.argv[1:])]),
        machine=machine_name(run.device),
        minutes=minutes,
        batch_tokens=arguments.batch_tokens,
    )
    path.write_text(text, encoding="utf-8")
    print(f"{text}\n{minutes:.1f} minutes in all, written to {arguments.out}")


if __name__ == "__main__":
    main()
