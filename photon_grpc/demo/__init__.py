"""The embedded models: two plain Hugging Face directories.

`TARGET` is a small Llama-architecture model of Python code, which comes with the package. `DRAFT` is its several times
smaller sibling with the same tokenizer, made for speculative decoding, which comes with the source only. MODEL_CARD.md
beside this file says what they were trained on and how well they do; `python -m benchmarks.embedded_model` trains them
again. This module knows only where the directories are.
"""

from __future__ import annotations

from pathlib import Path

TARGET: Path = Path(__file__).resolve().parent / "target"
DRAFT: Path = Path(__file__).resolve().parent / "draft"

__all__ = ["DRAFT", "TARGET"]
