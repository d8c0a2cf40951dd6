"""`python -m photon_grpc.demo.train --out DIRECTORY`: trains the embedded models and writes their model card."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from .card import CARD
from .corpus import Corpus, build_corpus
from .llama import Llama, LlamaShape, num_parameters
from .loop import FitOptions, fit, windows
from .release import (
    HeldOut,
    agreement,
    check_against_transformers,
    loss_rows,
    machine_name,
    round_to_bf16,
    samples,
    save_model,
)
from .tokenizer import encode_documents, train_tokenizer

# The target and the draft together stay below 16 MB in bf16; sizes divide by 128 so that quantization groups fit.
SHAPES = {
    "teacher": LlamaShape(512, 1408, num_layers=8, num_heads=8, num_kv_heads=4),
    "target": LlamaShape(256, 640, num_layers=8, num_heads=8, num_kv_heads=4),
    "draft": LlamaShape(128, 384, num_layers=2, num_heads=4, num_kv_heads=2),
}
DROPOUT = {"teacher": 0.2, "target": 0.0, "draft": 0.0}
DROPOUT_ALONE = 0.1
# `share` of --minutes at most; the teacher stops before it has learnt the files by heart.
STAGES = {
    "teacher": {"share": 0.32, "max_epochs": 10, "learning_rate": 3e-3, "weight_decay": 0.3},
    "target": {"share": 0.48, "max_epochs": 40, "learning_rate": 5e-3, "weight_decay": 0.1, "teacher_weight": 0.7},
    "draft": {"share": 0.20, "max_epochs": 40, "learning_rate": 8e-3, "weight_decay": 0.05, "teacher_weight": 0.9},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m photon_grpc.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where target/, draft/ and MODEL_CARD.md go")
    parser.add_argument("--minutes", type=float, default=5.0, help="time for all stages, compilation not counted")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stdlib", type=Path, help="standard library to learn (default: this interpreter's)")
    parser.add_argument("--compile", action="store_true", help="use torch.compile where it works")
    parser.add_argument("--no-teacher", action="store_true", help="train the target on the data alone")
    parser.add_argument("--max-files", type=int, help="read only so many files (to try the script)")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens a step, a multiple of 4096")
    return parser.parse_args()


def main() -> None:
    arguments, started = parse_arguments(), time.monotonic()
    device = torch.device(arguments.device)
    print(f"reading the standard library, training the tokenizer ({machine_name(device)})", flush=True)
    corpus = build_corpus(arguments.stdlib, arguments.max_files)
    tokenizer = train_tokenizer(corpus.files)
    documents = encode_documents(tokenizer, corpus.documents)
    held_outs = [
        HeldOut.of(name, sources, tokenizer)
        for name, sources in (("library", corpus.held_out_library), ("tests", corpus.held_out_tests))
        if sources
    ]
    print(f"{len(corpus.files)} files, {len(documents)} documents, {time.monotonic() - started:.0f} s", flush=True)
    models, stages = _train_stages(arguments, documents, held_outs, tokenizer, device)
    _write_card(arguments, corpus, held_outs, tokenizer, models, stages, started, device)


def _train_stages(
    arguments: argparse.Namespace,
    documents: list[np.ndarray],
    held_outs: list[HeldOut],
    tokenizer: Tokenizer,
    device: torch.device,
) -> tuple[dict[str, Llama], list[str]]:
    """Teacher, target, draft, each learning from the one before it; saves the last two as soon as they are ready."""
    models: dict[str, Llama] = {}
    summaries: list[str] = []
    previous: Llama | None = None
    stages = {name: stage for name, stage in STAGES.items() if name != "teacher" or not arguments.no_teacher}
    minutes_per_share = arguments.minutes / sum(stage["share"] for stage in stages.values())
    held_out = windows([document for part in held_outs for document in part.documents], 1024, device)
    for name, stage in stages.items():
        print(f"{name}:", flush=True)
        torch.manual_seed(arguments.seed)
        model = Llama(SHAPES[name], _dropout(name, previous)).to(device)
        summary = fit(model, documents, held_out, _fit_options(arguments, stage, minutes_per_share), previous)
        summaries.append(f"* {name}: {num_parameters(model):,} parameters, {summary}")
        round_to_bf16(model)
        if name != "teacher":
            save_model(model, tokenizer, arguments.out / name)
        models[name] = previous = model.eval()
    return models, summaries


def _dropout(name: str, teacher: Llama | None) -> float:
    """A teacher's probabilities keep a student from overfitting; without one, dropout has to."""
    return DROPOUT[name] if teacher is not None else max(DROPOUT[name], DROPOUT_ALONE)


def _fit_options(arguments: argparse.Namespace, stage: dict[str, float], minutes_per_share: float) -> FitOptions:
    options = {key: value for key, value in stage.items() if key != "share"}
    return FitOptions(
        minutes=minutes_per_share * stage["share"],
        seed=arguments.seed,
        compile=arguments.compile,
        batch_tokens=arguments.batch_tokens,
        **options,
    )


def _write_card(
    arguments: argparse.Namespace,
    corpus: Corpus,
    held_outs: list[HeldOut],
    tokenizer: Tokenizer,
    models: dict[str, Llama],
    stages: list[str],
    started: float,
    device: torch.device,
) -> None:
    target, draft = models["target"], models["draft"]
    held_out = windows([document for part in held_outs for document in part.documents], 1024, device)
    equal, overlap = agreement(target, draft, held_out)
    held_out_chars = sum(map(len, corpus.held_out_library + corpus.held_out_tests))
    num_chars = sum(map(len, corpus.files))
    losses = [row for name in ("target", "draft") for row in loss_rows(name, models[name], held_outs, device)]
    minutes = (time.monotonic() - started) / 60
    card = CARD.format(
        target_parameters=num_parameters(target),
        draft_parameters=num_parameters(draft),
        python=_python_version(arguments),
        num_files=len(corpus.files),
        num_megabytes=num_chars / 1e6,
        num_held_out=len(corpus.held_out_library) + len(corpus.held_out_tests),
        held_out_share=100 * held_out_chars / (held_out_chars + num_chars),
        losses="\n".join(losses),
        agreement=equal,
        overlap=overlap,
        command=" ".join(["python -m photon_grpc.demo.train", *sys.argv[1:]]),
        machine=machine_name(device),
        torch_version=torch.__version__,
        minutes=minutes,
        stages="\n".join(stages),
        samples=samples(target, tokenizer),
        draft_samples=samples(draft, tokenizer),
        batch_tokens=arguments.batch_tokens,
        check=check_against_transformers(target, arguments.out / "target"),
    )
    (arguments.out / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    print(card)
    print(f"{minutes:.1f} minutes in all, written to {arguments.out}")


def _python_version(arguments: argparse.Namespace) -> str:
    """The version of the interpreter, or what the name of the given library directory says."""
    return arguments.stdlib.name.removeprefix("python") if arguments.stdlib else platform.python_version()


if __name__ == "__main__":
    main()
