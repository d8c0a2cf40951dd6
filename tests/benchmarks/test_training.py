"""Training from a corpus to a card, with models of no use, and the figures of a model against transformers'."""

from __future__ import annotations

import argparse as some_library_file
import json
import math
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.embedded_model import __main__ as train
from benchmarks.embedded_model import completions, eagle3, evaluate, release
from benchmarks.embedded_model.corpus import PACKAGES, STDLIB, Corpus, write
from photon_grpc.config.eagle3 import read_eagle3_dir
from photon_grpc.demo import DRAFT

LEARNT = Path(some_library_file.__file__).read_text()
HELD_OUT = Path(textwrap.__file__).read_text()


@pytest.fixture(autouse=True)
def small_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "CONTEXTS", (512,))
    monkeypatch.setattr(evaluate, "MAX_NEW_TOKENS", 8)
    monkeypatch.setattr(completions, "NUM_PROMPTS", 3)
    monkeypatch.setattr(release, "PROMPTS", ("def fib(n):",))


@pytest.mark.full
def test_a_corpus_becomes_models_figures_and_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = {PACKAGES: [HELD_OUT], STDLIB: [HELD_OUT]}
    write(Corpus("3.11", 1, 1, [(LEARNT, ["<|bos|>x = 1\n<|eos|>"])], held_out), tmp_path / "corpus.xz")
    out, before = tmp_path / "out", tmp_path / "before.json"
    evaluate_draft = ["evaluate", str(DRAFT), "--corpus", str(tmp_path / "corpus.xz"), "--out", str(before)]
    monkeypatch.setattr(sys, "argv", [*evaluate_draft, "--name", "the old draft", "--device", "cpu"])
    evaluate.main()
    options = ["--minutes", "0.01", "--device", "cpu", "--batch-tokens", "4096", "--before", str(before)]
    flags = ["--tiny", "--teacher", "--corpus", str(tmp_path / "corpus.xz"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["train", *options, *flags])
    train.main()
    assert {path.name for path in out.iterdir()} == {"target", "draft", "evaluation.json", "MODEL_CARD.md"}
    for name in ("target", "draft"):
        files = {path.name for path in (out / name).iterdir()}
        assert files == {path.name for path in DRAFT.iterdir()}
        assert AutoModelForCausalLM.from_pretrained(out / name).num_parameters() > 0
    figures = json.loads((out / "evaluation.json").read_text())
    assert set(figures) == {"target", "draft"}
    assert 0 < figures["target"]["loss"][PACKAGES]["512"]["bits_per_byte"] < 20
    card = (out / "MODEL_CARD.md").read_text()
    for row in ("| target | other people's packages | 512 |", "| the old draft | standard library | 512 |"):
        assert row in card
    for learner, taught_by in (("target", "teacher"), ("draft", "target")):
        assert f"its loss is the cross\n  entropy to the {taught_by}'s probabilities" in card.split(f"* {learner}: ")[1]
    assert f"{flags[0]} --teacher --corpus corpus.xz --out out`" in card and str(tmp_path) not in card
    assert "* teacher: " in card and "Python files of 1 packages" in card and "Copyright © 2001" in card


def test_loss_is_transformers_loss() -> None:
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(DRAFT / "tokenizer.json"))
    found = evaluate.losses(model, tokenizer, [HELD_OUT])["512"]
    ids = torch.tensor([tokenizer.encode(HELD_OUT).ids])
    windows = [ids[:, start : start + 513] for start in range(0, ids.shape[1] - 512, 512)]
    with torch.no_grad():
        nats = sum(model(window, labels=window).loss.item() for window in windows) / len(windows)
    assert found["nats_per_token"] == pytest.approx(nats, rel=1e-4)
    bits_per_byte = nats * (ids.shape[1] + 1) / math.log(2) / len(HELD_OUT.encode())
    assert found["bits_per_byte"] == pytest.approx(bits_per_byte, rel=1e-4)


def test_greedy_texts_are_transformers_own_in_a_padded_batch() -> None:
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(DRAFT / "tokenizer.json"))
    prompts = ["def fib(n):", "import os\nimport sys\n\nclass Stack:"]
    together = evaluate.continue_texts(model, tokenizer, prompts, 0.0)
    for prompt, continuation in zip(prompts, together, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        alone = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :].tolist()
        assert continuation.text == tokenizer.decode(alone)


@pytest.mark.full
def test_a_head_is_trained_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = Tokenizer.from_file(str(DRAFT / "tokenizer.json")).encode(HELD_OUT * 3).ids
    library = [np.array(ids, dtype=np.uint16)] * 4, [np.array(ids, dtype=np.uint16)]
    monkeypatch.setattr(eagle3, "read_library", lambda: library)
    flags = ["--minutes", "0.02", "--batch-tokens", "256", "--length", "64", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["eagle3", *flags])
    eagle3.main()
    assert "right on held-out files" in capsys.readouterr().out
    found = read_eagle3_dir(tmp_path)
    assert (found.draft_vocab_size, found.layer.hidden_size) == (2048, 256)
