"""Generate the Python stubs and docs/api.md from the protos.

    python protos/generate.py [--out DIR]

Everything is written below DIR (the repository's root unless told): photon_grpc/v1/*_pb2.py, their typed .pyi files
with the comments as docstrings, *_pb2_grpc.py, descriptors.binpb (of all services that are served, those of others
included), and docs/api.md. The files are kept in git, so that running the
service needs no generator; a test compares them with a fresh run, byte for byte. Needs the `dev` extra: the generator
is held at the version whose stubs the oldest supported grpcio and protobuf accept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from api_reference import render_reference, undocumented
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
# The tree that this file stands in, also where another one is installed.
sys.path.insert(0, str(PROTOS.parent))

from photon_grpc.server.wire.features import ABSENT  # noqa: E402

SOURCES = (
    *(f"photon_grpc/v1/{name}.proto" for name in ("inference", "model", "errors", "annotations", "service")),
    "photon_grpc/admin/v1/admin.proto",
)
THIRD_PARTY = PROTOS / "third_party"
WELL_KNOWN = files("grpc_tools") / "_proto"
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


def compile_protos(*outputs: str) -> None:
    """Run protoc over all sources with the given output flags; raises RuntimeError when it fails."""
    binaries = Path(sys.executable).parent
    plugins = [f"--plugin={name}={binaries / name}" for name in PLUGINS]
    status = protoc.main(["protoc", f"-I{PROTOS}", f"-I{THIRD_PARTY}", f"-I{WELL_KNOWN}", *plugins, *outputs, *SOURCES])
    if status:
        raise RuntimeError(f"protoc ended with status {status}")


def generate_descriptors(out: Path) -> None:
    """Write `out`/photon_grpc/v1/descriptors.binpb: a FileDescriptorSet, each file after those that it imports."""
    path = out / "photon_grpc" / "v1" / "descriptors.binpb"
    standard = sorted(str(each.relative_to(THIRD_PARTY)) for each in THIRD_PARTY.rglob("*.proto"))
    compile_protos(f"--descriptor_set_out={path}", "--include_imports", *standard)


def generate_stubs(out: Path) -> None:
    """Write the Python stubs below `out`/photon_grpc/v1."""
    out.mkdir(parents=True, exist_ok=True)
    compile_protos(
        f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}"
    )


def load_descriptors() -> FileDescriptorSet:
    """The compiled sources, with their comments."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "descriptors.bin"
        compile_protos(f"--descriptor_set_out={path}", "--include_source_info")
        return FileDescriptorSet.FromString(path.read_bytes())


def generate_reference(out: Path) -> None:
    """Write `out`/docs/api.md: api_guide.md, then tables of every service, message and enum."""
    descriptors = load_descriptors()
    if missing := undocumented(descriptors):
        raise RuntimeError(f"no comment on {', '.join(missing)}")
    document = (PROTOS / "api_guide.md").read_text(encoding="utf-8") + "\n" + render_reference(descriptors, ABSENT)
    (out / "docs").mkdir(parents=True, exist_ok=True)
    (out / "docs" / "api.md").write_text(document, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the Python stubs and docs/api.md from the protos.")
    parser.add_argument("--out", type=Path, default=PROTOS.parent, help="root to write below (the repository)")
    out: Path = parser.parse_args().out
    generate_stubs(out)
    generate_descriptors(out)
    generate_reference(out)
    print(f"wrote {out / 'photon_grpc' / 'v1'} and {out / 'docs' / 'api.md'}")


if __name__ == "__main__":
    main()
