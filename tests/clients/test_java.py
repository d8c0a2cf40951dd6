"""Java's client, tested with Java's tools: its tests with servers that they kill, its artifact in a project, examples.

Skipped without Maven or a JDK, or if a dependency is neither in the local repository nor available.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JAVA = ROOT / "clients" / "java"
#: Maven downloads and compiles for minutes the first time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NOT_TO_BE_HAD = re.compile(
    r"[Cc]ould not (?:resolve|transfer|find) artifact|Could not resolve dependencies|[Uu]nable to resolve artifact"
    r"|Unknown host|PluginResolutionException|PluginVersionResolutionException"
)

PROMISED = {
    "Generate": ["tokens of log probability", "first token after"],
    "Stream": ["-- ", "outputTokens="],
    "Cancel": ["left the block after", "cancelled the future: true", "the deadline ended it: DEADLINE_"],
    "Chat": ["user: def add(a, b):", "assistant: ", "user: def is_even(n):"],
    "Structured": ["so far: number ", "one of three: "],
    "Multiplex": ["'def main():' -> ", "'': refused, INVALID_REQUEST (text)"],
}


def maven(*command: str, project: Path = JAVA) -> str:
    """Run Maven, and return its output. Skip if a dependency is missing, fail if Maven fails."""
    environment = os.environ | {"PHOTON_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    # Less compilation of the tools themselves takes less than half of the CPU time.
    environment.setdefault("MAVEN_OPTS", "-Xmx512m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    full = ["mvn", "-B", "-ntp", "-f", str(project), *command]
    done = subprocess.run(full, capture_output=True, text=True, env=environment)
    if done.returncode and (missing := NOT_TO_BE_HAD.search(done.stdout)):
        pytest.skip(f"Maven's repositories cannot be reached: {missing.group()}")
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@cache
def installed() -> None:
    """Install the client in Maven's local repository, as described in `clients/java/README.md`."""
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        pytest.skip("no Maven or no JDK")
    maven("-q", "-Dmaven.test.skip=true", "-Dmaven.source.skip=true", "install")


@pytest.mark.full
def test_java_tests_pass_and_none_is_skipped() -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes the certificates")
    installed()
    output = maven("test-compile", "surefire:test")
    totals = re.findall(r"Tests run: (\d+), Failures: 0, Errors: 0, Skipped: 0$", output, re.MULTILINE)
    assert totals, output[-8000:]


#: The first one shows that the client compiles and works; the others run in `make test-all`.
EXAMPLES = [pytest.param(name, marks=pytest.mark.full if name != "Generate" else ()) for name in PROMISED]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_another_project_runs(name: str, target: str) -> None:
    installed()
    arguments = (f"-Dexec.mainClass={name}", f"-Dexec.args={target}")
    output = maven("-q", "compile", "exec:java", *arguments, project=JAVA / "examples")
    for promise in PROMISED[name]:
        assert promise in output, output


@pytest.mark.full
def test_the_program_of_the_readme_is_built_by_its_pom_and_runs(tmp_path: Path, target: str) -> None:
    installed()
    readme = (JAVA / "README.md").read_text()
    (pom,) = re.findall(r"```xml\n(<project.*?)```", readme, re.DOTALL)
    (program,) = re.findall(r"```java\n(import [^`]*public class Try.*?)```", readme, re.DOTALL)
    (tmp_path / "pom.xml").write_text(pom)
    sources = tmp_path / "src" / "main" / "java"
    sources.mkdir(parents=True)
    (sources / "Try.java").write_text(program.replace("127.0.0.1:50051", target))
    maven("-q", "package", project=tmp_path)
    assert list((tmp_path / "target").glob("*.jar"))
    assert "return" in maven("-q", "compile", "exec:java", project=tmp_path)
