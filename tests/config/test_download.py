"""A model named by its id: what is fetched, under which name it is served, what is said when it cannot be had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest

from photon_grpc import demo
from photon_grpc.config.download import fetch_model
from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.resolve import resolve
from photon_grpc.errors import ConfigError
from tests.config.fake_hub import COMMIT, FakeHub, fake_hub

DEMO = {file.name: file.read_bytes() for file in demo.TARGET.iterdir() if file.is_file()}
CONFIG = json.loads(DEMO["config.json"])
Fetch = Callable[..., ServeConfig]


def repository(**files: bytes | None) -> dict[str, bytes]:
    """Return the embedded model's files with these changes, named with `_` for `.`; None removes a file."""
    changed = {name.replace("__", "/").replace("_", "."): content for name, content in files.items()}
    return {name: content for name, content in {**DEMO, **changed}.items() if content is not None}


HUB = {
    "a/good": repository(pytorch_bin=b"pickle", code_py=b"x", original__model_safetensors=b"twice"),
    "a/gguf": {"model.Q4.gguf": b"x", "config.json": DEMO["config.json"]},
    "a/pickled": {"pytorch_model.bin": b"x", "config.json": DEMO["config.json"]},
    "a/bare": {"README.md": b"x"},
    "a/other": repository(config_json=json.dumps({**CONFIG, "architectures": ["MambaForCausalLM"]}).encode()),
    "a/quantized": repository(config_json=json.dumps({**CONFIG, "quantization_config": {"bits": 4}}).encode()),
    "a/idsonly": {**repository(tokenizer_json=None), "tokenizer.model": b"x"},
}


@pytest.fixture(scope="module")
def repositories():  # type: ignore[no-untyped-def]
    with fake_hub(HUB) as hub:
        yield hub


@pytest.fixture
def hub(repositories: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    """With an empty cache of its own."""
    repositories.sent.clear()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", repositories.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", repositories.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return repositories


def fetch(model: str, **given: Any) -> ServeConfig:
    return fetch_model(resolve({"model": model, **given}, {}).config)


def test_an_id_becomes_a_directory_served_under_the_id(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    config = fetch("a/good")
    directory = Path(config.model.model)
    assert config.model.served_model_name == ("a/good",)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == {
        name: content for name, content in DEMO.items() if name.endswith((".json", ".jinja", ".safetensors"))
    }
    assert hub.sent.index("config.json") < hub.sent.index("model.safetensors")
    assert f"downloading {len(DEMO['model.safetensors']) / 1e9:,.2f} GB" in capsys.readouterr().err


def test_what_is_in_the_cache_is_not_asked_for_again(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    first = fetch("a/good")
    hub.sent.clear()
    capsys.readouterr()
    assert fetch("a/good") == first
    assert hub.sent == []
    assert "downloading" not in capsys.readouterr().err


def test_without_the_hub_the_cache_serves(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch("a/good")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    assert fetch("a/good") == first
    with pytest.raises(ConfigError, match="cannot be reached"):
        fetch("a/other")


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: FakeHub) -> None:
    assert fetch("a/good", revision="v2").model.model == fetch("a/good", revision=COMMIT).model.model
    with pytest.raises(ConfigError, match=r"--revision v3: a/good has no such branch, tag or commit"):
        fetch("a/good", revision="v3")
    with pytest.raises(ConfigError, match="--model is not one"):
        fetch(str(demo.TARGET), revision="v2")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("a/gguf", r"holds no \*.safetensors \(model.Q4.gguf is GGUF\)"),
        ("a/pickled", r"pytorch_model.bin is pickled PyTorch weights, which may hold code"),
        ("a/bare", r"holds no config.json; a model is a Hugging Face directory"),
        ("a/other", "MambaForCausalLM.*supported: LlamaForCausalLM, Qwen2"),
        ("a/quantized", "quantization_config.quant_method is missing"),
        ("a/none", "no such public model"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_downloaded(
    hub: FakeHub, model: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        fetch(model)
    assert "\n" not in str(raised.value)
    assert model in str(raised.value)
    assert not any(name.endswith((".safetensors", ".gguf", ".bin")) for name in hub.sent)


def test_a_full_disk_is_reported_with_both_sizes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(ConfigError, match="HF_HOME") as raised:
        fetch("a/good")
    assert (raised.value.needed, raised.value.limit) == (len(DEMO["model.safetensors"]), 10**6)
    assert "model.safetensors" not in hub.sent


def test_a_user_without_a_home_learns_how_to_set_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(ConfigError, match="set HF_HOME"):
        fetch("a/good")


def test_a_missing_tokenizer_is_reported_with_advice(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    fetch("a/idsonly")
    assert "`photon-grpc convert` makes one from its tokenizer.model" in capsys.readouterr().err


def test_a_given_name_is_kept(hub: FakeHub) -> None:
    assert fetch("a/good", served_model_name=["short"]).model.served_model_name == ("short",)


def test_a_directory_is_made_absolute_and_nothing_is_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path.parent)
    config = fetch(tmp_path.name)
    assert config.model.model == str(tmp_path.resolve())
    assert config.model.served_model_name == ()
    assert fetch_model(resolve({}, {}).config) == resolve({}, {}).config
    assert hub.sent == []
