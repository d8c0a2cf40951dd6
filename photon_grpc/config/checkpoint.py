"""Tensors of a model directory's safetensors files, from their headers alone: names, types, shapes, sizes. No torch.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the data; the header gives every
tensor's dtype, shape and [begin, end) offsets into the data. Everything is checked against the size of the file before
memory is allocated for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from photon_grpc.config.json_fields import parse_object, read_bytes, shown
from photon_grpc.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 2**20

#: Bits per element of each safetensors dtype.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file."""

    file: str
    #: As safetensors spells it: "F32", "BF16", ...
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a directory by name, and what its files look like from outside."""

    tensors: dict[str, TensorEntry]
    #: (file, bytes of it, its raw header), for the revision digest.
    files: tuple[tuple[str, int, bytes], ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors.values())


#: Of a directory whose weights are not there yet.
NO_WEIGHTS = Checkpoint({}, ())


def read_checkpoint(directory: Path) -> Checkpoint:
    """Headers of the directory's safetensors files: `model.safetensors`, else the files its index names, else all there
    are.

    Raise ModelLoadError for a malformed file, a tensor held twice, or an index that the files contradict.
    """
    index = _read_index(directory)
    names = sorted(set(index.values())) if index else _files_without_index(directory)
    tensors: dict[str, TensorEntry] = {}
    files = []
    for name in names:
        size, raw = _read_header(directory / name)
        for tensor, entry in _entries(name, raw, size - 8 - len(raw)).items():
            if tensor in tensors:
                raise ModelLoadError(f"{name}: {shown(tensor)} is also in {tensors[tensor].file}", field=tensor)
            tensors[tensor] = entry
        files.append((name, size, raw))
    for tensor, name in index.items():
        if tensor not in tensors or tensors[tensor].file != name:
            raise ModelLoadError(f"{INDEX_FILE}: {shown(tensor)} is not in {name}", field=tensor)
    return Checkpoint(tensors, tuple(files))


def _files_without_index(directory: Path) -> list[str]:
    if (directory / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    return sorted(path.name for path in directory.glob("*.safetensors"))


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor -> file; empty where a single file or no index is there."""
    path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).exists() or not path.exists():
        return {}
    weight_map = parse_object(read_bytes(path), path.name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path.name}: weight_map must be an object of tensor names", field="weight_map")
    for tensor, name in weight_map.items():
        if not _is_plain_name(name):
            raise ModelLoadError(
                f"{path.name}: weight_map.{shown(tensor)} must name a .safetensors file here, is {shown(name)}",
                field="weight_map",
            )
    return weight_map


def _is_plain_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not set(name) & {"/", "\\", "\0"}
        and len(name) < 256
    )


def _read_header(path: Path) -> tuple[int, bytes]:
    """(bytes of the file, its raw header)."""
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path.name}: there is no such file in {path.parent}")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not size:
                raise ModelLoadError(f"{path.name}: the file is empty")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelLoadError(
                    f"{path.name}: its header claims {length} bytes, the file has {size}", needed=length, limit=size
                )
            return size, file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path.name}: cannot be read ({error.strerror})") from None


def _entries(file: str, raw: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    header = parse_object(raw, file)
    header.pop("__metadata__", None)
    entries = {}
    spans = []
    for tensor, info in header.items():
        entries[tensor], span = _entry(file, tensor, info)
        spans.append((*span, tensor))
    _check_spans(file, spans, data_bytes)
    return entries


def _entry(file: str, tensor: str, info: Any) -> tuple[TensorEntry, tuple[int, int]]:
    def error(problem: str) -> ModelLoadError:
        return ModelLoadError(f"{file}: {shown(tensor)} {problem}", field=tensor)

    if not isinstance(info, dict):
        raise error("has no description")
    dtype, shape, span = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise error(f"has the unknown dtype {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > 8:
        raise error("has no valid shape")
    if not _are_sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise error("has no valid data_offsets")
    needed = math.prod(shape) * DTYPE_BITS[dtype]
    if needed != (span[1] - span[0]) * 8:
        raise error(
            f"needs {needed // 8} bytes for shape {shape} in {dtype}, its data_offsets give {span[1] - span[0]}"
        )
    return TensorEntry(file, dtype, tuple(shape), needed // 8), (span[0], span[1])


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**48 for v in values)


def _check_spans(file: str, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Tensors must fill the data without hole or overlap (the format's own rule)."""
    position = 0
    for begin, end, tensor in sorted(spans):
        if begin != position:
            raise ModelLoadError(
                f"{file}: {shown(tensor)} begins at byte {begin}, the tensor before it ends at {position}", field=tensor
            )
        position = end
    if position != data_bytes:
        raise ModelLoadError(
            f"{file}: its tensors take {position} bytes, the file has {data_bytes}", needed=position, limit=data_bytes
        )
