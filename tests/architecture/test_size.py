"""Packages and files stay small, and the folders of a package import each other in one direction."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

from tests.architecture.budgets import PACKAGE, lines_by_package, lines_of, recorded, sources

MAX_LINES = 400
#: Files above the limit and packages with a circle, until they are taken apart.
LONG_FILES: set[str] = set()
PACKAGES_WITH_CIRCLES: set[str] = set()

PACKAGES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_every_package_has_a_budget() -> None:
    assert lines_by_package().keys() == recorded()["lines"].keys(), "add or remove the package in budgets.toml"


@pytest.mark.parametrize("package", recorded()["lines"])
def test_a_package_keeps_its_budget(package: str) -> None:
    lines, limit = lines_by_package().get(package, 0), recorded()["lines"][package]
    assert lines <= limit, (
        f"{package} has {lines} lines, its budget is {limit}; write less, or a decision that raises it"
    )


def test_no_file_is_long() -> None:
    long = {str(path.relative_to(PACKAGE)) for path in sources() if lines_of(path) > MAX_LINES}
    assert long == LONG_FILES, f"split files over {MAX_LINES} lines; take those that are split out of LONG_FILES"


def folders_of(graph: grimp.ImportGraph, package: str) -> dict[str, set[str]]:
    """The folders of a package with those that they import; the modules beside its folders count as one more."""
    modules = graph.find_descendants(package) | {package}
    folder_of = {module: module if graph.find_children(module) else module.rpartition(".")[0] for module in modules}
    folders: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for module, folder in folder_of.items():
        inside = graph.find_modules_directly_imported_by(module) & modules
        folders[folder] |= {folder_of[name] for name in inside} - {folder}
    return folders


def circle_in(folders: dict[str, set[str]]) -> str:
    """One circle, drawn; "" if there is none."""
    try:
        TopologicalSorter(folders).prepare()
    except CycleError as error:
        return " imported by ".join(error.args[1])
    return ""


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_of_a_package_import_in_one_direction(graph: grimp.ImportGraph, package: str) -> None:
    circle = circle_in(folders_of(graph, f"photon_grpc.{package}"))
    assert bool(circle) == (package in PACKAGES_WITH_CIRCLES), circle or f"take {package} out of PACKAGES_WITH_CIRCLES"


def test_a_circle_between_folders_is_found() -> None:
    graph = grimp.ImportGraph()
    for module in ("a", "a.b", "a.b.x", "a.c", "a.c.y", "a.z"):
        graph.add_module(module)
    graph.add_import(importer="a.b.x", imported="a.c.y")
    graph.add_import(importer="a.z", imported="a.b.x")
    assert circle_in(folders_of(graph, "a")) == ""
    graph.add_import(importer="a.c.y", imported="a.z")
    assert "a.c" in circle_in(folders_of(graph, "a"))
