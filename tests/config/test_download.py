"""A model named by its id: what is fetched, under which name it is served, what is said when it cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from photon_grpc.config.download import fetch_model
from photon_grpc.config.resolve import resolve
from photon_grpc.errors import ConfigError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What the hub was asked for; it answers with an empty directory."""
    calls: list[dict[str, Any]] = []

    def answer(repo_id: str, **options: Any) -> str:
        calls.append({"id": repo_id, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    return calls


def test_an_id_becomes_a_directory_served_under_the_id(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    config = fetch_model(resolve({"model": "organisation/name"}, {}).config)
    assert config.model.model == str(tmp_path)
    assert config.model.served_model_name == ("organisation/name",)
    (call,) = asked
    assert call["id"] == "organisation/name"
    assert "*.safetensors" in call["allow_patterns"]
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in call["allow_patterns"])


def test_a_name_that_was_given_stays(asked: list[dict[str, Any]]) -> None:
    config = fetch_model(resolve({"model": "organisation/name", "served_model_name": ["short"]}, {}).config)
    assert config.model.served_model_name == ("short",)


def test_a_directory_is_made_absolute_and_nothing_is_fetched(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path.parent)
    config = fetch_model(resolve({"model": tmp_path.name}, {}).config)
    assert config.model.model == str(tmp_path.resolve())
    assert config.model.served_model_name == ()
    assert fetch_model(resolve({}, {}).config) == resolve({}, {}).config
    assert asked == []


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://example.com"))


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (RepositoryNotFoundError("none", response=RESPONSE), "no such public model"),
        (GatedRepoError("gated", response=RESPONSE), "HF_TOKEN"),
        (OSError("No space left on device\nand more"), "No space left on device"),
    ],
)
def test_a_failure_is_one_line_that_says_what_to_do(
    failure: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=told) as raised:
        fetch_model(resolve({"model": "organisation/name"}, {}).config)
    assert "\n" not in str(raised.value)
    assert "organisation/name" in str(raised.value)
