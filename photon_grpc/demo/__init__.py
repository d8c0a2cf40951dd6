"""The embedded models: two plain Hugging Face directories, and an EAGLE-3 head.

`TARGET` is a small model of Python code in the Llama architecture and part of the package. `DRAFT`, which only the
source tree has, is a several times smaller model with the same tokenizer, made for speculative decoding. `EAGLE3`,
which only the source tree has as well, drafts from states within the target. MODEL_CARD.md describes their training and
quality; `python -m benchmarks.embedded_model` trains them again, `… .eagle3` the head.
"""

from __future__ import annotations

from pathlib import Path

TARGET: Path = Path(__file__).resolve().parent / "target"
DRAFT: Path = Path(__file__).resolve().parent / "draft"
EAGLE3: Path = Path(__file__).resolve().parent / "eagle3"

__all__ = ["DRAFT", "EAGLE3", "TARGET"]
