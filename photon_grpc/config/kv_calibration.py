"""The file of scales for keys and values of 8 bits that `photon-grpc calibrate` writes and `serve` reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from photon_grpc.config.checkpoint import read_checkpoint
from photon_grpc.config.json_file import as_struct, parse_object, read_bytes
from photon_grpc.errors import ConfigError, ModelLoadError

#: Its name in a model directory.
FILE = "kv_scales.json"
FORMAT = "photon-grpc kv scales 1"

_SCALE = re.compile(
    r"\.self_attn\.((k_proj\.)?k_scale|(v_proj\.)?v_scale|[kv]_proj\.output_scale|kv_scale|q_scale|prob_scale)$"
)

#: Of every layer, a number for each key head.
Rows = tuple[tuple[Annotated[float, Meta(gt=0, lt=1e30)], ...], ...]
Offsets = tuple[tuple[tuple[Annotated[float, Meta(gt=-1e30, lt=1e30)], ...], ...], ...]


class KVCalibration(msgspec.Struct, frozen=True):
    """Scales of the keys and values of every layer and head, and what its keys share, as a text gave them."""

    format: str
    #: The model whose text this was.
    revision: str
    dtype: str
    num_tokens: int
    keys: Rows
    values: Rows
    #: Of every layer and head, a number for each of its dimensions; () for zeros.
    key_offsets: Offsets = ()


def is_kv_scale(name: str) -> bool:
    """Return whether a checkpoint's tensor of this name belongs to keys and values of 8 bits, not to the weights."""
    return _SCALE.search(name) is not None


def source_of_scales(directory: Path, file: str, *, has_weights: bool = True) -> Path | None:
    """Return where the scales of a model are: a file, the directory for its checkpoint, None for nowhere.

    `file` is the value of --kv-calibration. A file beside the model counts after the checkpoint's own scales.
    """
    if file:
        return Path(file).expanduser()
    if has_weights and any(map(is_kv_scale, read_checkpoint(directory).tensors)):
        return directory
    return directory / FILE if has_weights and (directory / FILE).is_file() else None


def write_calibration(calibration: KVCalibration, path: Path) -> None:
    """Write the file, one layer a line, replacing an older one at once."""
    facts = {name: getattr(calibration, name) for name in ("format", "revision", "dtype", "num_tokens")}
    lines = ["{", *(f' "{name}": {msgspec.json.encode(value).decode()},' for name, value in facts.items())]
    for name, end in (("keys", ","), ("values", ","), ("key_offsets", "")):
        rows = ",\n  ".join(msgspec.json.encode(row).decode() for row in getattr(calibration, name))
        lines.append(f' "{name}": [\n  {rows}\n ]{end}')
    part = path.with_name(f".{path.name}.part")
    part.write_text("\n".join([*lines, "}\n"]), encoding="utf-8")
    part.replace(path)


def read_calibration(path: Path, revision: str, shape: tuple[int, int, int]) -> KVCalibration:
    """Return the scales in `path` for (layers, key heads, head_dim).

    Raise ConfigError if they are malformed or another model's.
    """
    num_layers, num_heads, head_dim = shape
    try:
        found = as_struct(parse_object(read_bytes(path), path.name), KVCalibration, path.name)
    except ModelLoadError as error:
        raise ConfigError(f"{path}: {error}", field="kv_calibration") from None
    if found.format != FORMAT:
        raise ConfigError(f"{path}: format is {found.format!r}, not {FORMAT!r}", field="kv_calibration")
    if found.revision != revision:
        message = f"{path}: was written for another model or other weights; run photon-grpc calibrate again"
        raise ConfigError(message, field="kv_calibration")
    for name in ("keys", "values"):
        rows = getattr(found, name)
        if len(rows) != num_layers or any(len(row) != num_heads for row in rows):
            message = f"{path}: {name} must have {num_layers} layers of {num_heads} heads"
            raise ConfigError(message, field="kv_calibration")
    sizes = [[len(head) for head in layer] for layer in found.key_offsets]
    if sizes and sizes != [[head_dim] * num_heads] * num_layers:
        message = f"{path}: key_offsets must have {num_layers} layers of {num_heads} heads of {head_dim}"
        raise ConfigError(message, field="kv_calibration")
    return found
