"""Directories of what drafts for a shape with random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shapes import eagle3_config
from photon_grpc import demo


def shorter(flags: Sequence[str]) -> Path:
    """Return the directory of a draft model for the one of these flags: a layer less, else alike.

    With random weights of one seed both have the same layers but the last, so that they agree often, and not always.
    """
    if "--model" not in flags:
        return demo.DRAFT
    model = Path(flags[flags.index("--model") + 1])
    draft = model / "shorter"
    if not draft.exists():
        config = json.loads((model / "config.json").read_text())
        draft.mkdir()
        shorter_config = config | {"num_hidden_layers": config["num_hidden_layers"] - 1}
        (draft / "config.json").write_text(json.dumps(shorter_config))
        shutil.copy(model / "tokenizer.json", draft)
    return draft


def head(flags: Sequence[str]) -> Path:
    """Return the directory of an EAGLE-3 head for the model of these flags."""
    if "--model" not in flags:
        return demo.EAGLE3
    model = Path(flags[flags.index("--model") + 1])
    found = model / "head"
    if not found.exists():
        found.mkdir()
        config = eagle3_config(json.loads((model / "config.json").read_text()))
        (found / "config.json").write_text(json.dumps(config))
    return found
