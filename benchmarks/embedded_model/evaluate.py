"""`python -m benchmarks.embedded_model.evaluate DIRECTORY --corpus FILE.jsonl.xz --out FILE.json`: how good a model is.

Reads any Hugging Face directory through transformers, so that models with different tokenizers compare: bits per byte
of the same held-out texts, the share of completed functions that are Python, the share of repeated lines.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from .completions import (
    Continuation,
    function_prompts,
    is_python,
    mean_body_lines,
    opening_prompts,
    repeated_share,
)
from .corpus import PACKAGES, read
from .loop import windows
from .tokenizer import BOS_ID, END_ID, EOS_ID, PAD_ID, encode_documents, render_document

CONTEXTS = (1024, 4096)
TEMPERATURES = (0.0, 0.2, 0.8)
MAX_NEW_TOKENS = 160


def evaluate(directory: Path, held_out: dict[str, list[str]], device: torch.device) -> dict[str, Any]:
    """The figures, with plain keys and numbers, computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(device)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = function_prompts(held_out[PACKAGES])
    functions = {f"{heat:g}": continue_texts(model, tokenizer, prompts, heat) for heat in TEMPERATURES}
    openings = continue_texts(model, tokenizer, opening_prompts(held_out[PACKAGES]), 0.0)
    return {
        "loss": {name: losses(model, tokenizer, sources) for name, sources in held_out.items()},
        "functions": {
            heat: {
                "num": len(written),
                "python_share": sum(map(is_python, written)) / len(written),
                "mean_body_lines": mean_body_lines(written),
            }
            for heat, written in functions.items()
        },
        "openings": {"num": len(openings), "repeated_share": repeated_share(openings)},
    }


def losses(model: nn.Module, tokenizer: Tokenizer, sources: list[str]) -> dict[str, dict[str, float]]:
    """By length of context: nats per token, and bits per byte, of windows each on its own."""
    documents = encode_documents(tokenizer, [render_document(source) for source in sources])
    num_bytes = sum(len(source.encode()) for source in sources)
    bits_per_nat = sum(map(len, documents)) / num_bytes / math.log(2)
    nats = {length: _mean_loss(model, documents, length) for length in CONTEXTS}
    return {str(key): {"nats_per_token": loss, "bits_per_byte": loss * bits_per_nat} for key, loss in nats.items()}


@torch.no_grad()
def _mean_loss(model: nn.Module, documents: list[np.ndarray], length: int) -> float:
    rows = windows(documents, length, next(model.parameters()).device)
    total = 0.0
    for batch in rows.split(max(1, 8192 // length)):
        logits = model(batch[:, :-1]).logits
        total += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return total / (rows.shape[0] * length)


@torch.no_grad()
def continue_texts(model: Any, tokenizer: Tokenizer, prompts: list[str], temperature: float) -> list[Continuation]:
    """Each prompt as a document's beginning, all in one batch padded on the left; temperature 0 is greedy."""
    prompt_ids = [[BOS_ID, *tokenizer.encode(prompt, add_special_tokens=False).ids] for prompt in prompts]
    width = max(map(len, prompt_ids))
    ids = torch.tensor([[PAD_ID] * (width - len(row)) + row for row in prompt_ids], device=model.device)
    drawing = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    torch.manual_seed(0)
    written = model.generate(
        ids, attention_mask=(ids != PAD_ID).long(), max_new_tokens=MAX_NEW_TOKENS, pad_token_id=PAD_ID, **drawing
    )[:, width:].tolist()
    return [_continuation(tokenizer, prompt, row) for prompt, row in zip(prompts, written, strict=True)]


def _continuation(tokenizer: Tokenizer, prompt: str, ids: list[int]) -> Continuation:
    end = next((at for at, token in enumerate(ids) if token in (EOS_ID, END_ID)), None)
    return Continuation(prompt, tokenizer.decode(ids[:end]), end is not None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedded_model.evaluate", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="before", help="what the card calls the model (train --before FILE)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    figures = evaluate(arguments.directory, read(arguments.corpus).held_out, torch.device(arguments.device))
    arguments.out.write_text(json.dumps({arguments.name: figures}, indent=2) + "\n", encoding="utf-8")
    print(arguments.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
