"""The client as users import it, and its examples, under `mypy --strict`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TYPES = """
from collections.abc import Iterator
from typing import assert_type

from photon_grpc.client import Client, Generation, SyncClient, read_tool_message, tools_json
from photon_grpc.v1.inference_pb2 import Usage


def threads(client: SyncClient) -> None:
    assert_type(client.generate("x", max_tokens=1, hedge_after=0.5), Generation)
    assert_type(client.generate_message("x", Usage, temperature=0), Usage)
    assert_type(client.stream_messages("x", Usage), Iterator[Usage])
    assert_type(client.map(["x", [1, 2]], concurrency=3), Iterator[Generation])
    with client.multiplex() as many:
        assert_type(many.generate("x"), Generation)


async def loop(client: Client) -> None:
    assert_type(await client.generate_message("x", Usage), Usage)
    async for partial in client.stream_messages("x", Usage):
        assert_type(partial, Usage)
    async for index, result in client.map_unordered(["x"]):
        assert_type((index, result), tuple[int, Generation])
    await client.generate("x", max_tokens="many")  # type: ignore[arg-type]
    await client.generate("x", no_such_option=1)  # type: ignore[call-arg]
"""


@pytest.mark.timeout(300)
@pytest.mark.full
def test_examples_and_calls_are_typed(tmp_path: Path) -> None:
    """With the cache of `make lint` this takes only seconds."""
    (tmp_path / "calls.py").write_text(TYPES)
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "clients" / "python" / "README.md").read_text(), re.DOTALL)
    for number, program in enumerate(programs):
        (tmp_path / f"readme_{number}.py").write_text(program)
    paths = [*sorted((ROOT / "clients" / "python").glob("*.py")), *sorted(tmp_path.glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--strict", "--scripts-are-modules", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
