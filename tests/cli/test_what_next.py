"""What `make run` opens and offers: addresses, and commands that work as they are pasted."""

from __future__ import annotations

import ast
import json
import shlex
import socket
from typing import Any

import pytest

from photon_grpc.cli import first_addresses, first_run, main, server_libraries
from photon_grpc.cli.first_addresses import http_addresses
from photon_grpc.cli.what_next import ServerAddress, curl, examples, grpcurl
from photon_grpc.config.settings import settings

HERE = ServerAddress("127.0.0.1:50051", "http://127.0.0.1:8000/", "it's a model", chats=True)
OF_TLS = {"PHOTON_TLS_CA": "/my ca.pem", "PHOTON_CLIENT_TLS_CERT": "c.pem", "PHOTON_CLIENT_TLS_KEY": "k.pem"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings():
        monkeypatch.delenv(setting.variable, raising=False)


@pytest.fixture
def taken() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def words_of(command: str) -> list[str]:
    return shlex.split(command)


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_four_things_come_first() -> None:
    found = examples(HERE, {})
    assert [title.split(":")[0] for title, _ in found[:4]] == ["the page", "curl", "Python", "grpcurl"]
    assert found[0][1] == HERE.page
    ast.parse(found[2][1])
    without_http = examples(ServerAddress("h:1", "", "m", chats=True), {})
    assert [title for title, _ in without_http[:2]] == ["Python", "grpcurl"]


@pytest.mark.parametrize(
    ("chats", "path", "field"), [(True, "chat/completions", "messages"), (False, "completions", "prompt")]
)
def test_curl_posts_what_the_model_takes(chats: bool, path: str, field: str) -> None:
    words = words_of(curl(ServerAddress("h:1", "http://h:8000/", "it's", chats), {}))
    assert words[:3] == ["curl", "-N", f"http://h:8000/v1/{path}"]
    assert after(words, "-H") == "Content-Type: application/json"
    body = json.loads(after(words, "-d"))
    assert body["model"] == "it's" and body["stream"] is True and field in body


def test_a_key_and_certificates_are_sent_and_the_key_is_not_shown() -> None:
    environ = OF_TLS | {"PHOTON_API_KEY": "secret"}
    for command, dashes in ((curl(HERE, environ), "--"), (grpcurl(HERE.target, environ), "-")):
        words = words_of(command)
        found = [after(words, f"{dashes}{flag}") for flag in ("cacert", "cert", "key")]
        assert found == ["/my ca.pem", "c.pem", "k.pem"]
        assert "Bearer $PHOTON_API_KEY" in command and "secret" not in command
        assert "-plaintext" not in words
    public = {"PHOTON_TLS_CA": "public"}
    assert "cacert" not in curl(HERE, public) + grpcurl(HERE.target, public)
    assert "-plaintext" in grpcurl(HERE.target, {})


def test_the_http_server_is_at_port_8000_or_at_a_free_one_or_where_the_user_wants_it(
    taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = first_addresses.choose_address("127.0.0.1:0")
    monkeypatch.setattr(first_addresses, "DEFAULT_PAGE", free)
    assert http_addresses((), {}, once=False) == (free,)
    assert http_addresses((), {}, once=True) == ("127.0.0.1:0",)
    monkeypatch.setattr(first_addresses, "DEFAULT_PAGE", taken)
    assert http_addresses((), {}, once=False) == ("127.0.0.1:0",)
    assert http_addresses(("h:1",), {}, once=False) == ("h:1",)
    assert http_addresses((), {"PHOTON_HTTP_LISTEN": "h:2"}, once=False) == ()
    monkeypatch.setattr(server_libraries, "HTTP_LIBRARIES", ("no_such_library_of_ours",))
    assert http_addresses((), {}, once=False) == ()


@pytest.fixture
def first_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the flags and the options of the runs, none of which starts anything."""
    runs: list[tuple[list[str], dict[str, Any]]] = []
    monkeypatch.setattr(first_run, "first_run", lambda flags, address, **options: runs.append((flags, options)) or 0)
    return runs


def test_run_opens_the_http_server_and_names_its_page(
    first_runs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    origin = "--http-allowed-origin=https://chat.example.org"
    assert main.main(["run", "--once", origin]) == 0
    ((flags, options),) = first_runs
    (address,) = [flag.removeprefix("--http-listen=") for flag in flags if flag.startswith("--http-listen=")]
    assert options["page"] == f"http://{address}/" and not address.endswith(":0")
    assert origin in flags
    assert capsys.readouterr().err == ""


def test_run_without_the_libraries_of_the_http_server_says_what_to_install(
    first_runs: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_libraries, "HTTP_LIBRARIES", ("no_such_library_of_ours",))
    assert main.main(["run", "--once"]) == 0
    ((flags, options),) = first_runs
    assert not [flag for flag in flags if "http" in flag] and options["page"] == ""
    (line,) = capsys.readouterr().err.splitlines()
    assert "no_such_library_of_ours missing" in line and "pip install '.[http]'" in line


def test_run_refuses_a_port_in_use_that_the_user_names(taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "--once", "--http-listen", taken]) == 2
    assert f"--http-listen: {taken}: Address already in use" in capsys.readouterr().err
