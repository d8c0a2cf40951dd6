"""The files of `--service FILE[:full.name.Service]`, read once; what is in them is checked by those that serve it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from photon_grpc.config.proto_compiler import compile_proto
from photon_grpc.errors import ConfigError

FLAG = "--service"
#: All files together, which every front end gets in one message.
MAX_BYTES = 2**23
_SERVICE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


class ServiceFile(msgspec.Struct, frozen=True, array_like=True):
    """A serialized FileDescriptorSet, and the services of it that are wanted."""

    path: str
    data: bytes
    #: Full names; empty: all of them.
    services: tuple[str, ...] = ()


def read_service_files(given: Iterable[str], proto_paths: Sequence[str] = ()) -> tuple[ServiceFile, ...]:
    """Read the files of the flag's values, each once, and compile .proto files. Raise ConfigError naming the file."""
    wanted: dict[str, list[str]] = {}
    for value in given:
        path, service = _split(value)
        wanted.setdefault(path, []).append(service)
    files = []
    num_bytes = 0
    for path, services in wanted.items():
        data = compile_proto(FLAG, path, proto_paths) if path.endswith(".proto") else _read(path)
        num_bytes += len(data)
        if num_bytes > MAX_BYTES:
            message = f"{FLAG} {path}: with it the files have {num_bytes} bytes; {MAX_BYTES} are allowed"
            raise ConfigError(message, field=FLAG, needed=num_bytes, limit=MAX_BYTES)
        files.append(ServiceFile(path, data, () if "" in services else tuple(services)))
    return tuple(files)


def _split(value: str) -> tuple[str, str]:
    """Return path and service; "" for all services. A path may have a colon, too."""
    path, colon, service = value.rpartition(":")
    if colon and path and _SERVICE.fullmatch(service) and not Path(value).exists():
        return path, service
    return value, ""


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{FLAG} {path}: {error.strerror or 'cannot be read'}", field=FLAG) from None
