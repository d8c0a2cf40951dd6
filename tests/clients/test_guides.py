"""The commands and programs of the guides, run against a service."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from photon_grpc import demo

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:50051"
PAGES = [ROOT / "README.md", ROOT / "docs" / "guides" / "grpcurl.md", ROOT / "protos" / "api_guide.md"]


def commands() -> list[str]:
    """Return every command of the pages that calls the server, each on one line."""
    joined = [re.sub(r"\\\n\s*", "", page.read_text()) for page in PAGES]
    lines = [line for page in joined for line in page.splitlines()]
    return [line for line in lines if line.startswith(("grpcurl ", "ghz ")) and ADDRESS in line]


@pytest.mark.parametrize("command", commands())
@pytest.mark.full
def test_a_command_works(command: str, target: str) -> None:
    if shutil.which(tool := command.split()[0]) is None:
        pytest.skip(f"no {tool}")
    if "| jq" in command and shutil.which("jq") is None:
        pytest.skip("no jq")
    done = subprocess.run(["bash", "-c", command.replace(ADDRESS, target)], capture_output=True, text=True)
    if '"top_p": 0}' in command:
        assert "INVALID_REQUEST" in done.stderr
        assert "sampling.top_p" in done.stderr
    elif "-max-time" in command:
        assert done.returncode == 0 or "DeadlineExceeded" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def programs() -> list[str]:
    """Return the complete Python programs: blocks that import the client and open a connection."""
    pages = [
        ROOT / "README.md",
        *[ROOT / "docs" / "guides" / name for name in ("python.md", "chats.md", "structured-output.md")],
    ]
    pages += [ROOT / "docs" / "clients.md", ROOT / "clients" / "python" / "README.md"]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    opening = ("import Client", "import SyncClient")
    return [block for block in blocks if any(each in block for each in opening) and "example.org" not in block]


@pytest.mark.parametrize("program", programs())
@pytest.mark.full
def test_a_python_program_works(program: str, target: str) -> None:
    aimed = program.replace(ADDRESS, target).replace("SyncClient()", f'SyncClient("{target}")')
    done = subprocess.run([sys.executable, "-c", aimed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_library_example_of_the_readme_works() -> None:
    (program,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "import LLM" in block
    ]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    card = (demo.TARGET.parent / "MODEL_CARD.md").read_text()
    for prompt in ("def fib(n):", "class Stack:"):
        assert card.split(f"```python\n{prompt}")[1][:60] in done.stdout
