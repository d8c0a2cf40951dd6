"""Descriptor sets of .proto files, made by the optional package grpcio-tools in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from photon_grpc.errors import ConfigError

_LIMIT_S = 60.0
_MAX_ERROR_CHARS = 2000


def compile_proto(flag: str, file: str, proto_paths: Sequence[str]) -> bytes:
    """Return the serialized FileDescriptorSet of `file`, with its imports and comments.

    Imports are searched in `proto_paths`, then in the file's own directory. Raise ConfigError naming `flag`.
    """
    if find_spec("grpc_tools") is None:
        advice = "pip install grpcio-tools, or give what protoc --include_imports --include_source_info writes"
        raise ConfigError(f"{flag} {file}: .proto files need a compiler: {advice}", field=flag)
    if not Path(file).is_file():
        raise ConfigError(f"{flag} {file}: No such file", field=flag)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "set.binpb"
        # Absolute, because the compiler compares the paths of directories and file as texts.
        _run(flag, file, [f"-I{os.path.abspath(each)}" for each in (*proto_paths, os.path.dirname(file))], out)
        return out.read_bytes()


def _run(flag: str, file: str, includes: Sequence[str], out: Path) -> None:
    options = ("--include_imports", "--include_source_info", f"--descriptor_set_out={out}")
    # Its main adds the files of protobuf itself only if it is run as a module.
    command = [sys.executable, "-m", "grpc_tools.protoc", *includes, *options, os.path.abspath(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{flag} {file}: the compiler took more than {_LIMIT_S:g} s", field=flag) from None
    if done.returncode:
        raise ConfigError(f"{flag} {file}: {done.stderr.strip()[:_MAX_ERROR_CHARS]}", field=flag)
