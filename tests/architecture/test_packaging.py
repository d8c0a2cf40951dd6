"""What is declared and what is installed agree: dependencies, their reasons, the tested versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)["project"]


def declared() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(line) for line in (*PROJECT["dependencies"], *extras["serve"], *extras["dev"])]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


def test_every_dependency_has_a_tested_version_within_its_range() -> None:
    versions = pinned()
    for requirement in declared():
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is missing in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} was tested with {version}"


def test_constraints_choose_versions_and_no_index() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)] == []


def test_client_side_needs_nothing_of_the_server() -> None:
    base = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert base.isdisjoint({"torch", "triton", "transformers", "numpy", "tokenizers", "safetensors"})


def test_every_dependency_says_why_it_is_there() -> None:
    """A comment stands above each requirement, or above a few that belong together."""
    for listing in re.findall(r"^(?:dependencies|serve|dev) = \[\n(.*?)^\]", TEXT, flags=re.DOTALL | re.MULTILINE):
        marks = "".join("#" if line.strip().startswith("#") else "r" for line in listing.splitlines())
        assert marks.startswith("#")
        assert max(map(len, marks.split("#"))) <= 3, listing
