"""The properties of the Dockerfile, by its instructions, since no container engine builds it here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from photon_grpc import __version__
from photon_grpc.cli.main import cli
from tests.deploy.dockerfile import Dockerfile

ROOT = Path(__file__).resolve().parents[2]
FILE = Dockerfile.read()

targets = pytest.mark.parametrize("target", ["cpu", "cuda"])


def copies(stage: str) -> list[str]:
    """Return the files that a stage copies from the build context."""
    lines = (value.split() for value in FILE.whole(stage).of("COPY") if not value.startswith("--from="))
    return [source for *sources, _ in lines for source in sources]


def test_a_change_of_the_source_rebuilds_no_layer_of_packages() -> None:
    for stage in ("packages-cpu", "packages-cuda"):
        assert copies(stage) == ["constraints.txt"], stage
    assert "photon_grpc" in copies("wheel")


@targets
def test_the_last_layer_is_the_source(target: str) -> None:
    *_, copy, run, user = FILE.stages[target].instructions
    assert (copy.word, copy.value.split()[0]) == ("COPY", f"--from=packages-{target}")
    assert run.value.startswith("--mount=type=bind,from=wheel") and "--no-deps" in run.value
    assert user.word == "USER"


@targets
def test_it_runs_as_a_number_other_than_root(target: str) -> None:
    uid = FILE.whole(target).of("USER")[-1].partition(":")[0]
    assert int(uid) > 0
    assert f"-o {uid} " in " ".join(FILE.whole(target).of("RUN")), "the cache belongs to another"


@targets
def test_its_entry_point_its_command_and_its_probe_are_verbs(target: str) -> None:
    whole = FILE.whole(target)
    (entry,), (command,), (probe,) = (whole.of(word) for word in ("ENTRYPOINT", "CMD", "HEALTHCHECK"))
    assert json.loads(entry)[-1] == "photon-grpc"
    program, verb = json.loads(probe.partition(" CMD ")[2])
    assert (program, whole.of("STOPSIGNAL")) == ("photon-grpc", ["SIGTERM"])
    assert {verb, *json.loads(command)} <= set(cli.commands)


@targets
def test_caches_lie_in_the_volume(target: str) -> None:
    (volume,) = FILE.whole(target).of("VOLUME")
    environment = FILE.environment(target)
    assert all(environment[name].startswith(volume) for name in ("HOME", "TRITON_CACHE_DIR", "HF_HOME"))


@targets
def test_its_labels_are_those_of_the_project(target: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (labels,) = FILE.whole(target).of("LABEL")
    assert f'.licenses="{project["license"]}"' in labels and f'.title="{project["name"]}"' in labels
    assert f"VERSION={__version__}" in FILE.whole(target).of("ARG")


@pytest.mark.parametrize("stage", ["packages-cpu", "packages-cuda"])
def test_packages_are_the_tested_versions(stage: str) -> None:
    installs = [run for run in FILE.whole(stage).of("RUN") if "pip install" in run]
    assert len(installs) == 2
    assert all("-c /constraints.txt" in run for run in installs)


def test_its_list_of_requirements_is_that_of_the_server_its_http_server_and_its_spans(tmp_path: Path) -> None:
    """The stage's own line of Python, run on the project's own file."""
    (run,) = FILE.stages["requirements"].of("RUN")
    match = re.fullmatch(r'python -c "(.*)" > /requirements\.txt', run)
    assert match
    script = match[1].replace("/pyproject.toml", str(ROOT / "pyproject.toml"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert done.stdout.splitlines() == project["dependencies"] + extras["serve"] + extras["http"] + extras["otel"]


def test_what_it_copies_is_there_and_in_the_context() -> None:
    kept = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    wanted = {source for stage in FILE.stages for source in copies(stage)}
    assert wanted == kept
    assert all((ROOT / name).exists() for name in wanted)
