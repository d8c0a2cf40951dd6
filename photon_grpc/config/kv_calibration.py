"""The file of scales for keys and values of 8 bits that `photon-grpc calibrate` writes and `serve` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from photon_grpc.config.json_file import as_struct, parse_object, read_bytes
from photon_grpc.errors import ConfigError, ModelLoadError

#: Its name in a model directory.
FILE = "kv_scales.json"
FORMAT = "photon-grpc kv scales 1"

#: Of every layer, a number for each key head.
Rows = tuple[tuple[Annotated[float, Meta(gt=0, lt=1e30)], ...], ...]


class KVCalibration(msgspec.Struct, frozen=True):
    """Scales of the keys and values of every layer and head, as a text gave them."""

    format: str
    #: The model whose text this was.
    revision: str
    dtype: str
    num_tokens: int
    keys: Rows
    values: Rows


def write_calibration(calibration: KVCalibration, path: Path) -> None:
    """Write the file, one layer a line, replacing an older one at once."""
    facts = {name: getattr(calibration, name) for name in ("format", "revision", "dtype", "num_tokens")}
    lines = ["{", *(f' "{name}": {msgspec.json.encode(value).decode()},' for name, value in facts.items())]
    for name, end in (("keys", ","), ("values", "")):
        rows = ",\n  ".join(msgspec.json.encode(row).decode() for row in getattr(calibration, name))
        lines.append(f' "{name}": [\n  {rows}\n ]{end}')
    part = path.with_name(f".{path.name}.part")
    part.write_text("\n".join([*lines, "}\n"]), encoding="utf-8")
    part.replace(path)


def read_calibration(path: Path, revision: str, num_layers: int, num_heads: int) -> KVCalibration:
    """Return the scales in `path`. Raise ConfigError if they are malformed or another model's."""
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
    return found
