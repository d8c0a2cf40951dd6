"""Clients of OpenAI's API that others wrote, each in its own program: OpenAI's for Node, and LangChain's ChatOpenAI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from photon_grpc import demo
from tests.frontend.tool_templates import QWEN
from tests.gateway.served_model import Served, both_servers

HERE = Path(__file__).parent
#: Where `npm install openai` was run; unset: it is run here.
NODE_MODULES = os.environ.get("PHOTON_NODE_OPENAI", "")
LANGCHAIN_PYTHON = os.environ.get("PHOTON_LANGCHAIN_PYTHON", sys.executable)

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the embedded model with a chat template that has tools."""
    directory = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(demo.TARGET, directory)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": QWEN}))
    with both_servers(str(directory)) as opened:
        yield opened


def run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "all answers are right" in done.stdout, done.stdout + done.stderr


def test_the_client_for_node(servers: Served, tmp_path: Path) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no Node")
    shutil.copy(HERE / "node" / "openai_chat.mjs", tmp_path)
    if NODE_MODULES:
        (tmp_path / "node_modules").symlink_to(Path(NODE_MODULES) / "node_modules")
    else:
        install = ["npm", "install", "--no-audit", "--no-fund", "openai"]
        if subprocess.run(install, cwd=tmp_path, capture_output=True, timeout=240).returncode:
            pytest.skip("npm cannot install openai")
    run("node", "openai_chat.mjs", servers.http, "small", cwd=tmp_path)


def test_langchain(servers: Served) -> None:
    probe = [LANGCHAIN_PYTHON, "-c", "import langchain_openai"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("langchain_openai is not installed; PHOTON_LANGCHAIN_PYTHON names a Python that has it")
    run(LANGCHAIN_PYTHON, HERE / "clients" / "langchain_chat.py", servers.http, "small")
