"""The embedded models: two plain Hugging Face directories.

`TARGET` is a small model of Python code in the Llama architecture and part of the package. `DRAFT`, which only the
source tree has, is a several times smaller model with the same tokenizer, made for speculative decoding. MODEL_CARD.md
describes their training and quality; `python -m benchmarks.embedded_model` trains them again.
"""

from __future__ import annotations

from pathlib import Path

TARGET: Path = Path(__file__).resolve().parent / "target"
DRAFT: Path = Path(__file__).resolve().parent / "draft"

__all__ = ["DRAFT", "TARGET"]
