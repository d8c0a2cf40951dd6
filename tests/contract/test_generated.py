"""Stubs and docs/api.md match the protos, and the protos are sound."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto

from photon_grpc import errors
from photon_grpc.admin.v1 import admin_pb2
from photon_grpc.v1 import annotations_pb2, inference_pb2, model_pb2

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    command = [sys.executable, str(ROOT / "protos" / "generate.py"), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return out


def test_generated_files_are_current(regenerated: Path) -> None:
    """`make protos` would change no byte, and would leave no stale generated file."""
    made = {path.relative_to(regenerated) for path in regenerated.rglob("*") if path.is_file()}
    stubs = (ROOT / "photon_grpc").rglob("*_pb2*.py*")
    kept = {path.relative_to(ROOT) for path in stubs if path.suffix in (".py", ".pyi")}
    assert kept | {Path("docs/api.md"), Path("photon_grpc/v1/descriptors.binpb")} == made
    assert [str(name) for name in sorted(made) if (ROOT / name).read_bytes() != (regenerated / name).read_bytes()] == []


def test_protos_pass_buf_lint() -> None:
    buf = Path(sys.executable).parent / "buf"
    if not (buf.exists() or shutil.which("buf")):
        pytest.skip("buf is not installed")
    result = subprocess.run(
        [str(buf) if buf.exists() else "buf", "lint", "protos"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def all_subclasses(cls: type[errors.PhotonError]) -> set[type[errors.PhotonError]]:
    return {cls}.union(*(all_subclasses(child) for child in cls.__subclasses__()))


def test_error_table_names_every_reason_a_caller_can_meet() -> None:
    guide = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("## Errors")[1].split("\n## ")[0]
    documented = set(re.findall(r"`([A-Z_]+)`", guide)) & {cls.reason for cls in all_subclasses(errors.PhotonError)}
    answers = all_subclasses(errors.RequestError) | all_subclasses(errors.Unavailable)
    # Classes that a client derives, in modules that may have been imported, are never sent by a server.
    answers = {cls for cls in answers if cls.__module__ == errors.__name__}
    # The server never sends a base class either. UNAVAILABLE is also a status code.
    groups = {errors.RequestError, errors.NotAllowed, errors.Overloaded, errors.Unavailable}
    assert documented - {"UNAVAILABLE"} == {cls.reason for cls in answers - groups}


@pytest.mark.parametrize(
    "module", [inference_pb2, model_pb2, admin_pb2, annotations_pb2], ids=lambda module: module.__name__
)
def test_field_numbers_leave_no_gap(module: object) -> None:
    """Numbers run 1, 2, 3, ...; a gap would be a field that was removed without `reserved`."""
    for message in module.DESCRIPTOR.message_types_by_name.values():  # type: ignore[attr-defined]
        proto = DescriptorProto()
        message.CopyToProto(proto)
        reserved = [number for each in proto.reserved_range for number in range(each.start, each.end)]
        numbers = sorted([*reserved, *(field.number for field in message.fields)])
        assert numbers == list(range(1, len(numbers) + 1)), message.full_name


def test_services_are_as_published() -> None:
    """Clients in every language depend on the names and on which side streams."""
    published = {
        f"{service.name}.{method.name}": (method.client_streaming, method.server_streaming)
        for module in (inference_pb2, model_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert published == {
        "InferenceService.Generate": (False, False),
        "InferenceService.StreamGenerate": (False, True),
        "InferenceService.MultiplexGenerate": (True, True),
        "ModelService.ListModels": (False, False),
        "ModelService.GetModel": (False, False),
        "ModelService.Tokenize": (False, False),
        "ModelService.Detokenize": (False, False),
    }
