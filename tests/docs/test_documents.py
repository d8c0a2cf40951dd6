"""The documents say what is there: links lead somewhere, files that are named exist, generated pages are fresh, flags
are flags."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from photon_grpc.cli.main import cli
from photon_grpc.config.resolve import CLIENT_VARIABLES
from photon_grpc.config.settings import settings

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "photon_grpc"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "benchmarks" / "results"
CLIENT_FLAGS = {"--help"} | {
    flag for verb in ("generate", "chat") for each in cli.commands[verb].params for flag in each.opts
}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("name", ["configuration_reference.py", "http_reference.py"])
def test_the_generated_pages_are_fresh(name: str) -> None:
    script = ROOT / "docs" / name
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_configuration_page_has_every_setting() -> None:
    shown = (ROOT / "docs" / "configuration.md").read_text()
    for setting in settings():
        assert f"`{setting.flag}`" in shown
        assert f"`{setting.variable}`" in shown


def test_the_configuration_page_has_every_variable_of_the_verbs_that_call_a_server() -> None:
    shown = (ROOT / "docs" / "configuration.md").read_text()
    of_flags = {str(each.envvar) for verb in cli.commands.values() for each in verb.params if each.envvar}
    assert of_flags <= set(CLIENT_VARIABLES)
    assert all(f"| `{variable}` | " in shown for variable in CLIENT_VARIABLES)


def test_constraints_are_versions_of_all_that_is_asked_for_and_nothing_else() -> None:
    heading, *lines = re.split(r"^(?=[^#])", (ROOT / "constraints.txt").read_text(), maxsplit=1, flags=re.MULTILINE)
    assert len(heading.splitlines()) == 2
    pins = [re.fullmatch(r"([\w.-]+)==[\w.]+", line) for line in "".join(lines).splitlines()]
    assert all(pins), "a line that is no NAME==VERSION"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["serve"], *extras["otel"], *extras["dev"]]
    assert {spelt(re.split(r"[<>=;~ ]", each)[0]) for each in asked} <= {spelt(pin[1]) for pin in pins if pin}


def spelt(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_verbs_that_read_the_target_variable_are_named() -> None:
    reading = {
        name for name, verb in cli.commands.items() if any(each.envvar == "PHOTON_TARGET" for each in verb.params)
    }
    shown = (ROOT / "docs" / "configuration.md").read_text()
    sentence = shown[: shown.index(" read `PHOTON_TARGET`")].rpartition("\n\n")[2]
    assert set(re.findall("`(?:photon-grpc )?([a-z]+)`", sentence)) == reading
    taking = {name for name, verb in cli.commands.items() if any(each.name == "target" for each in verb.params)}
    terminal = (ROOT / "docs" / "guides" / "terminal.md").read_text()
    exempt = terminal[: terminal.index("do not read `PHOTON_TARGET`")].rpartition("The target of")[2]
    assert set(re.findall("`([a-z]+)`", exempt)) == taking - reading


def test_the_headline_is_of_the_table_below_it() -> None:
    """Quotients, and the version that they are of; the table's figures are those of the results that it names."""
    text = (ROOT / "README.md").read_text()
    ours, theirs = ((RESULTS / f"{name}.md").read_text() for name in ("one_arithmetic_h200", "offline_1b_h200"))
    theirs += (RESULTS / "offline_8b_h200.md").read_text()
    quotients: list[float] = []
    for row in re.findall(r"^\| (?:decode, ms a step|the same, 8B).*$", text, re.MULTILINE)[:2]:
        mine, other = ([float(each) for each in cell.strip(" *").split(" / ")] for cell in row.split("|")[2:4])
        assert all(is_in(each, ours) for each in mine) and all(is_in(each, theirs) for each in other)
        quotients += (one / two for one, two in zip(mine, other, strict=True))
    assert len(quotients) == 8
    headline = re.search(r"takes ([\d.]+) to ([\d.]+) of the time of vLLM ([\d.]+) ", text.partition("```")[0])
    assert headline and headline.groups() == (f"{min(quotients):.2f}", f"{max(quotients):.2f}", "0.24.0")
    assert "vLLM 0.24.0" in theirs and "| photon_grpc | vLLM 0.24 |" in text


def is_in(figure: float, page: str) -> bool:
    """Return whether a cell of a table on the page is rounded to it."""
    cells = re.findall(r"(?<=\| )\d+\.\d+(?= [|(])", page)
    return any(abs(float(cell) - figure) < 0.0051 for cell in cells)


def test_one_page_says_what_a_seed_promises() -> None:
    promises = [page for page in PAGES if re.search(r"same (tokens|text)[^.]{0,40}(alone|any batch)", page.read_text())]
    assert promises == []
    rule = next(line for line in (ROOT / "docs" / "api.md").read_text().split("\n* ") if line.startswith("**Seeds.**"))
    assert "bfloat16" in rule and "float32" in rule


def test_the_index_of_results_lists_every_page() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", (RESULTS / "README.md").read_text()))
    assert listed == {page.name for page in RESULTS.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", [*PAGES, *sorted(RESULTS.glob("*.md"))], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.resolve()), f"{link}#{anchor}"


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page, each of which is there once."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_]+)+\.(?:py|proto|md)|[a-z]+/)`", page.read_text()):
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), name


def test_python_files_that_the_code_names_exist() -> None:
    for source in PACKAGE.rglob("*.py"):
        check_python_files(source)


@pages
def test_python_files_that_a_page_names_exist(page: Path) -> None:
    check_python_files(page)


def check_python_files(path: Path) -> None:
    for name in re.findall(r"(?<![\w*./])[a-z_][\w/]*\.py\b", path.read_text()):
        assert any(known.endswith(f"/{name}") for known in python_files()), f"{path}: {name}"


@cache
def python_files() -> tuple[str, ...]:
    folders = ("photon_grpc", "tests", "benchmarks", "clients", "docs", "protos")
    return tuple(
        f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*.py")
    )


@pages
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)", page.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


@pytest.mark.parametrize(
    ("section", "title", "least"), [("Ends", "ended by", 50), ("Threats", "class", 10), ("Faults", "fault", 9)]
)
def test_tables_of_reliability_name_a_test_for_every_row(section: str, title: str, least: int) -> None:
    table = (ROOT / "docs" / "reliability.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(f"| {title} |")]
    assert len(rows) > least
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", row), row


@pages
def test_flags_that_are_named_exist(page: Path) -> None:
    known = {spelling for setting in settings() for spelling in (setting.flag, setting.no_flag)} | CLIENT_FLAGS
    for command in re.findall(r"photon-grpc (?:serve|doctor|generate|chat)[^\n`]*", page.read_text()):
        for flag in re.findall(r"--[a-z-]+", command):
            assert flag in known, flag


@pages
def test_python_in_the_pages_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        # Blocks may await: a guide shows the inside of a coroutine.
        compile("async def shown():\n" + "".join(f"    {line}\n" for line in block.splitlines()), str(page), "exec")
