"""Where a checkpoint says how its weights are quantized: in config.json, or in a file of an older tool beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from photon_grpc.config.json_file import parse_object, read_bytes
from photon_grpc.config.quantization import WeightFormat
from photon_grpc.config.quantization_config import read_quantization
from photon_grpc.errors import ModelLoadError

#: The key of config.json, and its older name in compressed-tensors.
KEYS = ("quantization_config", "compression_config")
#: What AutoGPTQ wrote beside a config.json without such a key.
GPTQ_FILE = "quantize_config.json"


class Quantization(NamedTuple):
    """The format of quantized weights, None if they are not, and the file beside config.json that says so, or b""."""

    format: WeightFormat | None
    file: bytes


def find_quantization(path: Path, values: Mapping[str, Any]) -> Quantization:
    """Read what the keys of config.json say, else a file of AutoGPTQ. Raise ModelLoadError naming key and place."""
    key = next((key for key in KEYS if values.get(key) is not None), None)
    if key is not None:
        return Quantization(_read(values[key], key if key != KEYS[0] else ""), b"")
    file = path / GPTQ_FILE
    if not file.exists() and not file.is_symlink():  # a broken link is an error, not a file that is missing
        return Quantization(None, b"")
    content = read_bytes(file)
    return Quantization(_read({"quant_method": "gptq"} | parse_object(content, GPTQ_FILE), GPTQ_FILE), content)


def _read(value: Any, place: str) -> WeightFormat | None:
    try:
        return read_quantization(value)
    except ModelLoadError as error:
        if not place:
            raise
        raise ModelLoadError(f"{error} (read from {place})", field=error.field) from None
