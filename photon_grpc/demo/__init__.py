"""The embedded models: two plain Hugging Face directories that come with the package.

`TARGET` is a small Llama-architecture model of Python code, `DRAFT` its several times smaller sibling with the same
tokenizer, made for speculative decoding. MODEL_CARD.md beside this file says what they were trained on and how well
they do; `python -m photon_grpc.demo.train` trains them again. This module knows only where the directories are.
"""

from __future__ import annotations

from pathlib import Path

TARGET: Path = Path(__file__).resolve().parent / "target"
DRAFT: Path = Path(__file__).resolve().parent / "draft"

__all__ = ["DRAFT", "TARGET"]
