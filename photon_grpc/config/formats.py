"""The files of a model that are read, and the words for those that are not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

#: What a model directory holds.
WANTED = "a Hugging Face directory with config.json, *.safetensors and, for text, tokenizer.json"

#: Endings of weights that are not read, and why not.
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

#: Vocabularies that `photon-grpc convert` makes a tokenizer.json of.
CONVERTIBLE = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def has_weights(names: Iterable[str]) -> bool:
    return any(name.endswith(".safetensors") for name in names)


def foreign_weights(names: Iterable[str]) -> str:
    """ "pytorch_model.bin is pickled PyTorch weights, which may hold code"; empty where no name ends like weights."""
    for name in sorted(names):
        if kind := FOREIGN.get(PurePath(name).suffix.lower()):
            return f"{name} is {kind}"
    return ""


def about_tokenizer(names: Iterable[str]) -> str:
    """Say what a model without tokenizer.json does, and how it gets one; empty where it has one."""
    present = set(names)
    if "tokenizer.json" in present:
        return ""
    source = next((name for name in CONVERTIBLE if name in present), "")
    remedy = f"; `photon-grpc convert` makes one of its {source}" if source else ""
    return f"no tokenizer.json: token ids in and out, no text{remedy}"
