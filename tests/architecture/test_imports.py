"""The directions of imports: the contracts of pyproject.toml hold, and cover every package that exists."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

from photon_grpc.config.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "photon_grpc"

NO_TENSORS = {
    *("server", "gateway", "access", "observe", "client", "frontend", "bridge", "engine", "core", "config", "errors"),
    *("v1", "admin"),
}
#: Packages that know gRPC or protobuf; observe sends spans.
ON_THE_WIRE = {"server", "observe", "client", "v1", "admin"}
ABOVE_THE_WIRE = {"cli", "service", "compose", "__main__"}
# Files of compose that join parts of the server, and those of LLM, which reads requests as the server does.
WITH_THE_WIRE = {
    f"compose.{name}" for name in ("access", "llm", "message_type", "observation", "other_services", "tracing")
}
# Loads a server with ready-made messages: the one place above that speaks them.
MESSAGES_OF_A_VERB = "photon_grpc.cli.load.load_client"
# Programs of processes that must start fast and survive the engine: supervisor and front end.
PROGRAMS_WITHOUT_TENSORS = ("photon_grpc.service.supervisor", "photon_grpc.service.processes.frontend")


def packages() -> set[str]:
    """Names of the packages and modules directly below photon_grpc."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return folders | {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}


def contract(contract_id: str) -> dict[str, list[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(one for one in contracts if one["id"] == contract_id)


def test_import_contracts_hold() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    result = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_contract_without_tensors_names_every_package() -> None:
    named = {module.removeprefix("photon_grpc.").split(".")[0] for module in contract("no-tensors")["source_modules"]}
    assert named - {"compose"} == NO_TENSORS, "list the package under no-tensors in pyproject.toml"


def test_contract_without_wire_names_every_package() -> None:
    named = {module.removeprefix("photon_grpc.") for module in contract("no-wire")["source_modules"]}
    of_compose = {f"compose.{path.stem}" for path in (PACKAGE / "compose").glob("*.py")} - {"compose.__init__"}
    expected = (packages() - ON_THE_WIRE - ABOVE_THE_WIRE) | (of_compose - WITH_THE_WIRE)
    assert named == expected, "list the package, or the file of compose, under no-wire in pyproject.toml"


def imported_modules(graph: grimp.ImportGraph, module: str) -> set[str]:
    """Modules of the package that `module` imports directly."""
    return {name for name in graph.find_modules_directly_imported_by(module) if name.startswith("photon_grpc.")}


def modules_in(graph: grimp.ImportGraph, package: str) -> set[str]:
    return graph.find_descendants(package) | {package} if package in graph.modules else set()


def test_roof_leaves_the_wire_to_the_server(graph: grimp.ImportGraph) -> None:
    """cli, service and compose choose concrete classes; messages and channels are for server and client."""
    for module in set().union(*(modules_in(graph, f"photon_grpc.{package}") for package in ABOVE_THE_WIRE)) - {
        MESSAGES_OF_A_VERB
    }:
        wire = graph.find_modules_directly_imported_by(module) & {"grpc", "google"}
        assert not wire, f"{module} imports {wire}"


@pytest.mark.parametrize("program", PROGRAMS_WITHOUT_TENSORS)
def test_program_reaches_no_tensors(graph: grimp.ImportGraph, program: str) -> None:
    for library in {"torch", "triton", "transformers"} & graph.modules:
        chain = graph.find_shortest_chain(importer=program, imported=library) if program in graph.modules else None
        assert chain is None, " imports ".join(chain or ())


@pytest.mark.parametrize("package", ["frontend", "engine", "runner", "models", "layers", "core"])
def test_settings_reach_a_package_as_plain_values(graph: grimp.ImportGraph, package: str) -> None:
    for module in modules_in(graph, f"photon_grpc.{package}"):
        assert "photon_grpc.config.flags" not in imported_modules(graph, module), f"{module} imports config.flags"


def test_kernels_import_only_kernels(graph: grimp.ImportGraph) -> None:
    for module in modules_in(graph, "photon_grpc.kernels") - {"photon_grpc.kernels"}:
        strangers = {name for name in imported_modules(graph, module) if not name.startswith("photon_grpc.kernels.")}
        assert not strangers, f"{module} imports {strangers}"


def test_model_families_do_not_import_each_other(graph: grimp.ImportGraph) -> None:
    """A family that needs code of its own shares what it can through the builder."""
    families = {f"photon_grpc.models.{family.model_type}" for family in FAMILIES.values()} & graph.modules
    for family in families:
        others = imported_modules(graph, family) & families
        assert not others, f"{family} imports {others}"


def test_a_model_in_the_callers_program_loads_no_grpc(graph: grimp.ImportGraph) -> None:
    """Importing a file also runs the __init__ of every package that holds it, which import-linter does not follow."""
    loaded, waiting = set[str](), {"photon_grpc.compose.llm"}
    while waiting:
        module = waiting.pop()
        loaded.add(module)
        package = module.rpartition(".")[0]
        imported = graph.find_modules_directly_imported_by(module) if module.startswith("photon_grpc") else set()
        waiting |= (imported | ({package} if package else set())) - loaded
    assert "photon_grpc.client" in loaded and "google" in loaded
    assert not loaded & {"grpc", "grpc_health", "grpc_reflection", "grpc_status"}


def test_importing_the_package_loads_neither_torch_nor_grpc() -> None:
    code = "import sys, photon_grpc; photon_grpc.__version__; print(*{'torch', 'grpc', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
