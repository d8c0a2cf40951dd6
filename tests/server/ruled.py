"""Descriptor sets with rules of protovalidate, from the text of a .proto."""

from __future__ import annotations

import gzip
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

CASES = gzip.decompress((Path(__file__).parent / "protovalidate" / "cases.binpb.gz").read_bytes())
_RULES = "buf/validate/validate.proto"
_HEAD = """
syntax = "proto3";
package acme.v1;
import "buf/validate/validate.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
service Ruled {
  rpc Ask(Question) returns (Reply);
  rpc List(Question) returns (stream Reply);
}
"""


def ruled(text: str, *, head: str = _HEAD) -> bytes:
    """Return the set of a service whose method Ask takes a Question and returns a Reply, both in `text`."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        (directory / "imports.binpb").write_bytes(_imports())
        (directory / "ruled.proto").write_text(head + text)
        _protoc(f"-I{made}", f"--descriptor_set_in={made}/imports.binpb", f"{made}/ruled.proto", out=directory / "set")
        return (directory / "set").read_bytes()


@cache
def _imports() -> bytes:
    """Return the set of what a .proto with rules imports."""
    known = [file.name for file in FileDescriptorSet.FromString(CASES).file if file.name.startswith("google/")]
    with tempfile.TemporaryDirectory() as made:
        _protoc(f"-I{files('grpc_tools') / '_proto'}", *known, out=Path(made) / "set")
        found = FileDescriptorSet.FromString((Path(made) / "set").read_bytes())
    found.file.extend([file for file in FileDescriptorSet.FromString(CASES).file if file.name == _RULES])
    return found.SerializeToString()


def _protoc(*flags: str, out: Path) -> None:
    given = ["--include_imports", "--include_source_info", f"--descriptor_set_out={out}"]
    assert not protoc.main(["protoc", *given, *flags])
