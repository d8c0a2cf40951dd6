"""`keys new`: stderr shows a key, stdout is a block that a server takes."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from photon_grpc.cli import main
from photon_grpc.config.api_keys import read_api_keys


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Return a new key and its block."""
    assert main.main(["keys", "new", *arguments]) == 0
    shown = capsys.readouterr()
    (secret,) = re.findall(r"^    (photon-\S{43})$", shown.err, re.MULTILINE)
    return secret, shown.out


def test_a_key_may_have_the_scope_of_a_service(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(made(capsys, "--scope", "service:acme.v1.Triage")[1])
    assert read_api_keys(str(file))[0].scopes == ("service:acme.v1.Triage",)
    assert main.main(["keys", "new", "--scope", "service:"]) == 2
    assert "service:FULL.NAME" in capsys.readouterr().err


def test_the_block_has_the_digest_of_the_key_and_not_the_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    limits = ("--max-concurrent", "3", "--tokens-per-minute", "1000")
    secret, block = made(capsys, "search", "--scope", "generate", "--scope", "admin", *limits)
    other, other_block = made(capsys)
    assert secret not in block and secret != other
    file = tmp_path / "keys.toml"
    file.write_text(block + other_block)
    key, unnamed = read_api_keys(str(file))
    assert key.sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert (key.name, key.scopes, key.max_concurrent, key.tokens_per_minute) == (
        "search",
        ("generate", "admin"),
        3,
        1000,
    )
    assert (unnamed.scopes, unnamed.max_concurrent, unnamed.tokens_per_minute) == (("generate", "models"), None, None)


def test_a_block_appended_to_the_file_is_valid_and_contains_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    command = [sys.executable, "-m", "photon_grpc", "keys", "new"]
    for name in ("search", "chat"):
        with path.open("a") as file:
            shown = subprocess.run([*command, name], stdout=file, stderr=subprocess.PIPE, text=True, check=True).stderr
        (secret,) = re.findall(r"photon-\S{43}", shown)
        assert secret not in path.read_text()
    assert [key.name for key in read_api_keys(str(path))] == ["search", "chat"]


def test_a_name_that_is_invalid_in_the_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["keys", "new", "two words"]) == 2
    assert "two words" in capsys.readouterr().err


def test_it_needs_no_server() -> None:
    code = (
        "import sys; from photon_grpc.cli.main import main; main(['keys', 'new']); "
        "print({'grpc', 'torch', 'msgspec'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"
