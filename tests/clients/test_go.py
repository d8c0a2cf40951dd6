"""Go's client, tested with Go's tools.

Its tests run with the race detector against a service and replicas that they kill; further checks are vet, staticcheck,
the examples and regenerated stubs. Skipped without Go, or if a module is neither in its cache nor available.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from photon_grpc import demo

ROOT = Path(__file__).resolve().parents[2]
GO = ROOT / "clients" / "go"
#: Compiling gRPC with the race detector takes minutes the first time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

#: The model of replicas that are killed; the smaller one starts sooner.
SERVE = f"{sys.executable} -m photon_grpc serve --model {demo.DRAFT} --device cpu --max-num-seqs 8 --num-blocks 1024"

PROMISED = {
    "generate": ["tokens, ended by", "first token after", "then "],
    "stream": ["-- ", "tokens in"],
    "cancel": ["left after 3 messages", "cancelled: true", "out of time: true"],
    "chat": ["user: def add(a, b):", "assistant: ", "user: def is_even(n):"],
    "structured": ["invoice ", "so far: ", "one of three: "],
    "multiplex": ['"def main():" -> ', '"": refused, INVALID_REQUEST'],
}


def go(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["go", *command], cwd=GO, capture_output=True, text=True, env=os.environ | {"GOFLAGS": "-mod=mod"} | environment
    )


def need(module: Path) -> None:
    """Skip the test if the modules of a go.mod are not available."""
    if shutil.which("go") is None:
        pytest.skip("no go")
    if (downloaded := go("-C", str(module), "mod", "download")).returncode:
        pytest.skip(f"modules of {module.relative_to(ROOT)} are not to be had: {downloaded.stderr.splitlines()[-1]}")


def passed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.full
def test_go_tests_pass_raced_and_none_is_skipped(target: str) -> None:
    need(GO)
    race = ["-race"] if shutil.which("gcc") else []
    environment = {"TEST_TARGET": target, "TEST_SERVE": SERVE, "PYTHONPATH": str(ROOT)}
    output = passed(go("test", *race, "-count=1", "-v", "./...", **environment))
    assert "--- PASS: TestKillsLoseAndRepeatNoToken" in output
    assert "--- SKIP" not in output


@pytest.mark.full
def test_vet_and_gofmt_find_nothing() -> None:
    need(GO)
    passed(go("vet", "./..."))
    assert subprocess.run(["gofmt", "-l", "."], cwd=GO, capture_output=True, text=True).stdout == ""


@pytest.mark.full
def test_staticcheck_finds_nothing(tmp_path: Path) -> None:
    need(GO)
    need(GO / "tools")
    tool = tmp_path / "staticcheck"
    passed(go("-C", "tools", "build", "-o", str(tool), "honnef.co/go/tools/cmd/staticcheck"))
    passed(subprocess.run([str(tool), "./..."], cwd=GO, capture_output=True, text=True))


@pytest.mark.full
def test_stubs_made_anew_are_those_in_git(tmp_path: Path) -> None:
    need(GO / "tools")
    if not (shutil.which("buf") or (Path(sys.executable).parent / "buf").exists()):
        pytest.skip("no buf")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(GO / "generate.sh"), str(tmp_path)]
    passed(subprocess.run(command, capture_output=True, text=True, env=environment))
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.go")}
    assert made == {path.relative_to(GO) for path in GO.rglob("*.pb.go")}
    assert [str(name) for name in sorted(made) if (GO / name).read_bytes() != (tmp_path / name).read_bytes()] == []


@pytest.mark.full
def test_the_module_builds_in_another_ones_directory(tmp_path: Path) -> None:
    """The README's commands build its program without access to the repository's host."""
    need(GO)
    module = next(line for line in (GO / "go.mod").read_text().splitlines() if line.startswith("module ")).split()[1]
    (program,) = re.findall(r"```go\n(package main.*?)```", (GO / "README.md").read_text(), re.DOTALL)
    (tmp_path / "main.go").write_text(program)
    for command in (
        ["mod", "init", "example.com/user"],
        ["mod", "edit", f"-replace={module}={GO}"],
        ["mod", "tidy"],
        ["build", "-o", str(tmp_path / "user"), "."],
    ):
        passed(go("-C", str(tmp_path), *command))
    # Only programs that import photonotel depend on OpenTelemetry.
    assert "opentelemetry" not in (tmp_path / "go.mod").read_text()


#: The first one shows that the client compiles and works; the others run in `make test-all`.
EXAMPLES = [pytest.param(name, marks=pytest.mark.full if name != "generate" else ()) for name in PROMISED]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, target: str) -> None:
    need(GO)
    output = passed(go("run", f"./examples/{name}", target))
    for promise in PROMISED[name]:
        assert promise in output, output
