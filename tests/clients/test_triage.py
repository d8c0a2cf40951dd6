"""clients/triage: a service of one's own, called with plain stubs of Python, Go and Java, and with grpcurl."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from grpc_tools import protoc

from tests.service.running import serving

ROOT = Path(__file__).resolve().parents[2]
TRIAGE = ROOT / "clients" / "triage"
#: Compiling gRPC takes minutes the first time.
pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """Return the address of a server that compiled the .proto itself."""
    with serving("--service", str(TRIAGE / "triage.proto")) as service:
        yield service.wait_ready()[0]
        assert service.end() == 0


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the example, in which stubs are made."""
    ignored = shutil.ignore_patterns("target", "*_pb2*", "acmev1", "go.sum", "__pycache__")
    return Path(shutil.copytree(TRIAGE, tmp_path / "triage", ignore=ignored))


def output(command: list[str], directory: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode and ("dial tcp" in done.stderr or "Could not transfer" in done.stdout):
        pytest.skip(f"modules are not to be had: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def stubs(directory: Path, *flags: str) -> None:
    includes = (f"-I{directory}", f"-I{files('grpc_tools') / '_proto'}")
    assert not protoc.main(["protoc", *includes, *flags, "triage.proto"])


def test_python(copy: Path, target: str) -> None:
    stubs(copy, f"--python_out={copy}", f"--grpc_python_out={copy}")
    assert ", severity " in output([sys.executable, "call.py", target], copy)


def test_go(copy: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("go") is None:
        pytest.skip("no go")
    plugins = ("google.golang.org/protobuf/cmd/protoc-gen-go", "google.golang.org/grpc/cmd/protoc-gen-go-grpc")
    output(["go", "build", "-o", str(copy), *plugins], ROOT / "clients" / "go" / "tools")
    monkeypatch.setenv("PATH", f"{copy}:{os.environ['PATH']}")
    module = "module=triage"
    stubs(copy, f"--go_out={copy}", f"--go_opt={module}", f"--go-grpc_out={copy}", f"--go-grpc_opt={module}")
    output(["go", "mod", "tidy"], copy)
    assert ", severity " in output(["go", "run", ".", target], copy)


def test_java(copy: Path, target: str) -> None:
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        pytest.skip("no Maven or no Java")
    command = ["mvn", "-q", "-B", "-ntp", "compile", "exec:java", f"-Dexec.args={target}"]
    assert ", severity " in output(command, copy)


def test_grpcurl(copy: Path, target: str) -> None:
    if shutil.which("grpcurl") is None:
        pytest.skip("no grpcurl")
    request = ["grpcurl", "-plaintext", "-d", '{"subject": "It leaks"}', target, "acme.v1.TriageService/Triage"]
    assert output(request, copy).startswith("{")
