"""What is declared and what is installed agree: dependencies, their reasons, the tested versions."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)["project"]
PROVIDERS = packages_distributions()


def declared() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    tested = (extras[name] for name in ("serve", "http", "otel", "dev"))
    return [Requirement(line) for line in (*PROJECT["dependencies"], *chain.from_iterable(tested))]


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


def test_no_file_of_the_repository_is_ignored() -> None:
    """Wheels and sdists leave out what .gitignore names, though git knows it."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    listing = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""


def test_constraints_choose_versions_and_no_index() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)] == []


def test_client_side_needs_nothing_of_the_server() -> None:
    base = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert base.isdisjoint({"torch", "triton", "transformers", "numpy", "tokenizers", "safetensors"})


def test_every_dependency_says_why_it_is_there() -> None:
    """A comment stands above each requirement, or above a few that belong together."""
    names = "|".join(["dependencies", *PROJECT["optional-dependencies"]])
    for listing in re.findall(rf"^(?:{names}) = \[\n(.*?)^\]", TEXT, flags=re.DOTALL | re.MULTILINE):
        marks = "".join("#" if line.strip().startswith("#") else "r" for line in listing.splitlines())
        assert marks.startswith("#")
        assert max(map(len, marks.split("#"))) <= 4, listing


@cache
def third_party_imports(path: Path) -> tuple[str, ...]:
    """Names that a file of ours imports from elsewhere."""
    return tuple(_third_party_imports(path))


def _third_party_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.split(".")[0] not in {*sys.stdlib_module_names, "photon_grpc"})


def needed_to_run() -> Iterator[str]:
    """Requirements of the package and of every extra but `dev`."""
    yield from PROJECT["dependencies"]
    for name, extra in PROJECT["optional-dependencies"].items():
        yield from extra if name != "dev" else ()


def distributions_of(name: str) -> set[str]:
    """Who provides an import. Several share the namespace `google`: those under google.rpc and google.protobuf
    differ."""
    google = {"google.rpc": "googleapis-common-protos", "google.protobuf": "protobuf"}
    for prefix, distribution in google.items():
        if name.startswith(prefix):
            return {distribution}
    return {canonicalize_name(found) for found in PROVIDERS.get(name.split(".")[0], [name])}


def test_every_import_is_a_declared_dependency() -> None:
    known = {canonicalize_name(Requirement(line).name) for line in needed_to_run()}
    # Comes with torch's CUDA wheels; kernels/lang/jit.py does without.
    known.add("triton")
    for path in sorted((ROOT / "photon_grpc").rglob("*.py")):
        strangers = {name for name in third_party_imports(path) if not distributions_of(name) & known}
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_every_dependency_is_imported() -> None:
    names = {name for path in (ROOT / "photon_grpc").rglob("*.py") for name in third_party_imports(path)}
    used = set().union(*map(distributions_of, names))
    installed_only = {"uvloop"} if sys.platform == "win32" else set()
    # Reads a kind of tokenizer.model for transformers.
    used.add("tiktoken")
    assert {canonicalize_name(Requirement(line).name) for line in needed_to_run()} - used - installed_only == set()


def test_client_side_imports_only_the_base_install() -> None:
    known = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    for package in ("client", "v1", "admin", "errors.py"):
        place = ROOT / "photon_grpc" / package
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            strangers = {name for name in third_party_imports(path) if not distributions_of(name) & known}
            assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"
