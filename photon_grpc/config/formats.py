"""The files of a model that are read, and the descriptions of those that are not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

#: The contents of a model directory.
WANTED = "a Hugging Face directory with config.json, *.safetensors and, for text, tokenizer.json"

#: Suffixes of weights that are not read, and their formats.
FOREIGN = {
    ".gguf": "GGUF",
    ".ggml": "GGML",
    ".bin": "pickled PyTorch weights, which may hold code",
    ".pt": "pickled PyTorch weights, which may hold code",
    ".pth": "pickled PyTorch weights, which may hold code",
    ".ckpt": "pickled PyTorch weights, which may hold code",
    ".onnx": "ONNX",
    ".h5": "Keras weights",
    ".msgpack": "Flax weights",
}

#: Vocabularies from which `photon-grpc convert` makes a tokenizer.json.
CONVERTIBLE = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def has_weights(names: Iterable[str]) -> bool:
    return any(name.endswith(".safetensors") for name in names)


def foreign_weights(names: Iterable[str]) -> str:
    """Return such as "pytorch_model.bin is pickled PyTorch weights, which may hold code"; "" if there are none."""
    for name in sorted(names):
        if kind := FOREIGN.get(PurePath(name).suffix.lower()):
            return f"{name} is {kind}"
    return ""


def about_tokenizer(names: Iterable[str]) -> str:
    """Return what a model without tokenizer.json can do, and the way to get one; "" if it has one."""
    present = set(names)
    if "tokenizer.json" in present:
        return ""
    source = next((name for name in CONVERTIBLE if name in present), "")
    remedy = f"; `photon-grpc convert` makes one from its {source}" if source else ""
    return f"no tokenizer.json: token ids in and out, no text{remedy}"
