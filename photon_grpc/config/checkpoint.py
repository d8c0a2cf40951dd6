"""The tensors of a model directory's safetensors files, read from the headers only, without torch.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the data. The safetensors
library checks dtypes, shapes and offsets against each other and against the size of the file. This module checks the
rest: that each file is a regular one, the length of its header, the number of dimensions, and that the files are
consistent.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError, safe_open

from photon_grpc.config.json_file import no_file, parse_object, read_bytes, shown
from photon_grpc.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Enough for about 100,000 tensors. The library takes up to 20 times the memory of the header.
MAX_HEADER_BYTES = 16 * 2**20
MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file."""

    file: str
    #: As safetensors spells it: "F32", "BF16", ...
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size, by the bits per element in the dtype's name ("BF16", "F8_E4M3"); BOOL has 8."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a directory by name, and the names of its files."""

    tensors: dict[str, TensorEntry]
    files: tuple[str, ...]


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of `model.safetensors`, or of the files in its index, or of all safetensors files.

    Raise ModelLoadError for a malformed file, a tensor held twice, or an index that the files contradict.
    """
    index = _read_index(directory)
    tensors: dict[str, TensorEntry] = {}
    names = _file_names(directory, index)
    for name in names:
        for tensor, entry in _read_entries(directory / name).items():
            if tensor in tensors:
                raise ModelLoadError(f"{name}: {shown(tensor)} is also in {tensors[tensor].file}", field=tensor)
            tensors[tensor] = entry
    for tensor, name in index.items():
        if tensor not in tensors or tensors[tensor].file != name:
            raise ModelLoadError(f"{INDEX_FILE}: {shown(tensor)} is not in {name}", field=tensor)
    return Checkpoint(tensors, names)


def fingerprint(directory: Path) -> bytes:
    """Return name, size and sha256 of the header of every safetensors file, unparsed, since parsing imports numpy."""
    parts = []
    for name in _file_names(directory, _read_index(directory)):
        size, header = _read_header(directory / name)
        parts += [f"{name}\0{size}\0".encode(), sha256(header).digest()]
    return b"".join(parts)


def _file_names(directory: Path, index: dict[str, str]) -> tuple[str, ...]:
    if (directory / SINGLE_FILE).exists():
        return (SINGLE_FILE,)
    return tuple(sorted(set(index.values()) or {path.name for path in directory.glob("*.safetensors")}))


def _read_index(directory: Path) -> dict[str, str]:
    """Return the file of each tensor; {} if there is a single file or no index."""
    path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).exists() or not path.exists():
        return {}
    weight_map = parse_object(read_bytes(path), path.name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path.name}: weight_map must be an object of tensor names", field="weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]{,243}\.safetensors", name):
            raise ModelLoadError(
                f"{path.name}: weight_map.{shown(tensor)} must name a .safetensors file here, is {shown(name)}",
                field="weight_map",
            )
    return weight_map


def _read_header(path: Path) -> tuple[int, bytes]:
    """Return the size of the file and its raw header."""
    try:
        if not path.is_file():
            raise no_file(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not size:
                raise ModelLoadError(f"{path.name}: the file is empty")
            limit = min(size - 8, MAX_HEADER_BYTES)
            if length > limit:
                problem = f"claims {length} bytes; the file has {size}, and the limit is {MAX_HEADER_BYTES}"
                raise ModelLoadError(f"{path.name}: its header {problem}", needed=length, limit=limit)
            return size, file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path.name}: cannot be read ({error.strerror})") from None


def _read_entries(path: Path) -> dict[str, TensorEntry]:
    _read_header(path)
    try:
        with safe_open(path, framework="numpy") as file:
            entries = {
                tensor: TensorEntry(path.name, part.get_dtype(), tuple(part.get_shape()))
                for tensor in file.keys()  # noqa: SIM118 (it is not a dict)
                for part in [file.get_slice(tensor)]
            }
    except OSError as error:
        raise ModelLoadError(f"{path.name}: cannot be read ({error})") from None
    except SafetensorError as error:
        problem = shown(str(error).removeprefix("Error while deserializing header: "), limit=200)
        raise ModelLoadError(f"{path.name}: is not a valid safetensors file: {problem}") from None
    for tensor, entry in entries.items():
        if len(entry.shape) > MAX_DIMENSIONS:
            problem = f"has {len(entry.shape)} dimensions, at most {MAX_DIMENSIONS} are supported"
            raise ModelLoadError(f"{path.name}: {shown(tensor)} {problem}", field=tensor)
    return entries
