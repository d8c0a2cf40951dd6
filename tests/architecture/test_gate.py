"""What must not be in the source: code from data, vague names, paths of somebody's machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for path in (ROOT / "photon_grpc").rglob("*.py") if path.parent.name != "v1")

# Reading any of these runs code that came with the data.
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
# multiprocessing pickles whatever crosses its pipes and queues; shared memory alone is bytes.
BANNED_EXCEPT = {"multiprocessing": {"shared_memory"}}
BANNED_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen"), ("jinja2", "Environment")}
BANNED_BUILTINS = {"eval", "exec", "compile", "__import__"}
BANNED_KEYWORDS = {"trust_remote_code", "allow_pickle"}

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
VAGUE_FILES = {"util", "utils", "common", "helper", "helpers", "misc"}
VAGUE_SUFFIXES = ("Manager", "Helper", "Handler", "Util", "Utils", "Processor", "Wrapper", "Info")


class Found(NamedTuple):
    """What these tests look for in a source."""

    offences: list[str]
    reckonings: list[str]
    classes: list[str]
    docstrings: list[str]


@cache
def found_in(path: Path) -> Found:
    """Parse a source once for all tests."""
    nodes = nodes_of(path.read_text(encoding="utf-8"))
    documented = (node for node in nodes if isinstance(node, DOCUMENTED))
    return Found(
        list(offences(nodes)),
        list(reckonings(nodes)),
        [node.name for node in nodes if isinstance(node, ast.ClassDef)],
        [text for node in documented if (text := ast.get_docstring(node))],
    )


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def by_path(field: str) -> dict[str, list[str]]:
    """Return a field of Found of every source that has some."""
    return {str(path.relative_to(ROOT)): found for path in SOURCES if (found := getattr(found_in(path), field))}


def offences(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every construct that the gate refuses, with its line."""
    for node in nodes:
        for found in offences_of(node):
            yield f"line {getattr(node, 'lineno', '?')}: {found}"


def offences_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (f"import {name.name}" for name in names if is_banned_module(name.name))
        case ast.ImportFrom(module=str(module), names=names):
            yield from (f"from {module} import {name.name}" for name in names if is_banned_import(module, name.name))
        case ast.Attribute(value=ast.Name(id=module), attr=attr) if (module, attr) in BANNED_ATTRIBUTES:
            yield f"{module}.{attr}"
        case ast.Call(func=ast.Name(id=name)) if name in BANNED_BUILTINS:
            yield f"{name}()"
        case ast.keyword(arg=str(name), value=value) if name in BANNED_KEYWORDS and not is_false(value):
            yield f"{name}="
        case ast.keyword(arg="shell", value=ast.Constant(value=True)):
            yield "shell=True"
        case ast.Constant(value=str(text)) if text in BANNED_KEYWORDS:
            yield repr(text)


def is_false(value: ast.expr) -> bool:
    """Written as False: a library whose default asks on the terminal is told no."""
    return isinstance(value, ast.Constant) and value.value is False


def is_banned_module(name: str) -> bool:
    root, _, rest = name.partition(".")
    return root in BANNED_MODULES or (root in BANNED_EXCEPT and rest not in BANNED_EXCEPT[root])


def is_banned_import(module: str, name: str) -> bool:
    root = module.split(".")[0]
    return (root, name) in BANNED_ATTRIBUTES or (is_banned_module(module) and is_banned_module(f"{module}.{name}"))


def test_nothing_turns_data_into_code() -> None:
    assert by_path("offences") == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from pickle import loads",
        "from torch import load",
        "import multiprocessing",
        "from multiprocessing import Queue",
        "torch.load(path)",
        "eval('1')",
        "exec(code)",
        "f(trust_remote_code=True)",
        "f(**{'trust_remote_code': True})",
        "subprocess.run('ls', shell=True)",
        "from jinja2 import Environment",
        "numpy.load(path, allow_pickle=True)",
        "read(path, trust_remote_code=flag)",
    ],
)
def test_gate_refuses(source: str) -> None:
    assert list(offences(nodes_of(source)))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "read(path, trust_remote_code=False)",
        "re.compile('a')",
        "from multiprocessing import shared_memory",
        "from multiprocessing.shared_memory import SharedMemory",
        "subprocess.Popen([sys.executable, '-m', 'x'])",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment",
        "safetensors.torch.load_file(path)",
    ],
)
def test_gate_lets_pass(source: str) -> None:
    assert not list(offences(nodes_of(source)))


#: Processes of the load generator agree by it on a moment to begin; `top` shows how long ago a server says it started.
WALL_CLOCKS = {"cli/load/load.py", "cli/load/load_client.py", "cli/terminal/watching.py"}


def reckonings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Sums, differences and comparisons of wall-clock times."""
    for node in nodes:
        if isinstance(node, ast.BinOp | ast.Compare | ast.AugAssign):
            yield from (f"line {call.lineno}" for call in ast.walk(node) if is_wall_clock(call))


def is_wall_clock(node: ast.AST) -> TypeGuard[ast.Call]:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="time" | "time_ns")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="datetime"), attr="now" | "utcnow")):
            return True
    return False


def test_a_clock_that_is_stepped_changes_no_duration() -> None:
    """Wall-clock times are told, never reckoned with."""
    assert by_path("reckonings").keys() <= {f"photon_grpc/{name}" for name in WALL_CLOCKS}
    for source in ("left_s = end_s - time.time()", "if time.time() > end_s: pass"):
        assert list(reckonings(nodes_of(source)))


def test_names_say_what_things_are() -> None:
    vague = [path for path in SOURCES if VAGUE_FILES & {path.stem, *path.relative_to(ROOT).parts}]
    assert vague == []
    for path, classes in by_path("classes").items():
        assert [name for name in classes if name.endswith(VAGUE_SUFFIXES)] == [], path


# Written in pieces, so that this file does not contain them.
MACHINE_PATH = re.compile(
    "|".join(["/ro" + r"ot/", "/ho" + r"me/\w", "/Us" + r"ers/\w", "/wo" + r"rk/", r"[A-Z]:\\Us" + "ers"])
)


def test_tracked_files_name_no_machine_path() -> None:
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.decode().split("\0") if name]
    texts = ((path, read_text(path)) for path in paths if path.is_file())
    found = [f"{path.relative_to(ROOT)}: {hit.group()}" for path, text in texts for hit in MACHINE_PATH.finditer(text)]
    assert found == []


def read_text(path: Path) -> str:
    """The file's text; empty for what is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


ROUNDABOUT = re.compile(r"(What|Which|Who|Whose|How|Why)\b|.*\b(nobody|whoever|somebody|anybody)\b", re.DOTALL)


def test_a_name_is_that_of_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path, classes in by_path("classes").items():
        for name in classes:
            places.setdefault(name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_docstrings_state_facts() -> None:
    told = by_path("docstrings").items()
    assert [f"{path}: {text}" for path, texts in told for text in texts if ROUNDABOUT.match(text)] == []
