"""A change of the protos that breaks callers is refused."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from photon_grpc.v1 import annotations_pb2, inference_pb2, model_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
BUF = Path(sys.executable).parent / "buf"
pytestmark = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed")


def compared(protos: Path) -> subprocess.CompletedProcess[str]:
    command = [str(PROTOS / "check_breaking.sh"), str(protos)]
    return subprocess.run(command, env={**os.environ, "BUF": str(BUF)}, capture_output=True, text=True)


def test_the_protos_keep_to_the_baseline() -> None:
    result = compared(PROTOS)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  string salt = 2", "  string pepper = 2"),
        ("  string salt = 2", "  string salt = 9"),
        ("  string salt = 2", "  bytes salt = 2"),
        ("  FINISH_REASON_ABORTED = 8;", ""),
        ("optional uint32 max_tokens = 1", "uint32 max_tokens = 1"),
        ("rpc StreamGenerate(", "rpc Stream("),
    ],
    ids=["renamed", "renumbered", "retyped", "removed", "without presence", "method"],
)
def test_a_broken_field_is_named(old: str, new: str, tmp_path: Path) -> None:
    shutil.copytree(PROTOS, tmp_path / "protos")
    path = tmp_path / "protos" / "photon_grpc" / "v1" / "inference.proto"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    result = compared(tmp_path / "protos")
    assert result.returncode and "inference.proto" in result.stdout, result.stderr


def test_the_changelog_names_the_baseline() -> None:
    digest = hashlib.sha256((PROTOS / "baseline.binpb").read_bytes()).hexdigest()[:16]
    assert digest in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_options_of_fields_are_as_agreed() -> None:
    """Ranges become no narrower, and parts of a stream join as before; buf compares no options."""
    baseline = FileDescriptorSet.FromString((PROTOS / "baseline.binpb").read_bytes())
    agreed = {
        f"{file.package}.{message.name}.{field.name}": field.options.Extensions
        for file in baseline.file
        for message in file.message_type
        for field in message.field
    }
    now = {
        field.full_name: field.GetOptions().Extensions
        for module in (inference_pb2, model_pb2)
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }
    shared = agreed.keys() & now.keys()
    assert len(shared) > 150
    for name in shared:
        assert now[name][annotations_pb2.delta] == agreed[name][annotations_pb2.delta], name
        assert now[name][annotations_pb2.needs_refusal] <= agreed[name][annotations_pb2.needs_refusal], name
        assert not is_narrower(now[name][annotations_pb2.range], agreed[name][annotations_pb2.range]), name


def is_narrower(range: annotations_pb2.Range, agreed: annotations_pb2.Range) -> bool:
    """Return whether a value in `agreed` may be outside `range`."""
    least, most = bounds(range)
    agreed_least, agreed_most = bounds(agreed)
    has_other_form = (range.off, range.maximum_limit) != (agreed.off, agreed.maximum_limit)
    is_shorter = range.maximum_characters < (agreed.maximum_characters or 2**32) and range.HasField(
        "maximum_characters"
    )
    return least > agreed_least or most < agreed_most or has_other_form or is_shorter


def bounds(range: annotations_pb2.Range) -> tuple[float, float]:
    least = range.minimum if range.HasField("minimum") else -math.inf
    most = range.maximum if range.HasField("maximum") else math.inf
    return math.nextafter(least, math.inf) if range.exclusive_minimum else least, most


@pytest.mark.parametrize(
    ("narrower", "wider"),
    [
        ({"maximum": 10}, {"maximum": 100}),
        ({"minimum": 1}, {}),
        ({"maximum_characters": 9}, {"maximum_characters": 10}),
    ],
    ids=str,
)
def test_a_narrower_range_is_found(narrower: dict[str, float], wider: dict[str, float]) -> None:
    assert is_narrower(annotations_pb2.Range(**narrower), annotations_pb2.Range(**wider))  # type: ignore[arg-type]
    assert not is_narrower(annotations_pb2.Range(**wider), annotations_pb2.Range(**narrower))  # type: ignore[arg-type]
