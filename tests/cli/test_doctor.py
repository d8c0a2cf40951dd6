"""`doctor` refuses what `serve` refuses at its start, in the same words."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_grpc import demo
from photon_grpc.cli import doctor, main
from photon_grpc.cli.terminal.settings_flags import as_flags
from photon_grpc.compose.access import access
from photon_grpc.compose.assemble import assemble
from photon_grpc.config.resolve import resolve
from photon_grpc.config.settings import settings
from photon_grpc.errors import ConfigError
from photon_grpc.service.processes import check_start
from photon_grpc.service.processes.start_report import StartReport
from tests.server.certificates import Authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")

FREE = {"listen": ("127.0.0.1:0",), "device": "cpu"}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """Return settings with which `serve` does not start."""
    directory = tmp_path_factory.mktemp("refused")
    authority = Authority(directory, "authority")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        busy, too = (f"127.0.0.1:{taken.getsockname()[1]}" for taken in (one, other))
        yield {
            "listen": {"listen": (busy,)},
            "admin": {"admin_listen": f"unix:{directory}/none/socket"},
            "metrics": {"metrics_listen": too},
            "tls": {"tls_cert": str(authority.signed("one").cert), "tls_key": str(authority.signed("two").key)},
            "keys": {"api_keys_file": f"{directory}/none.toml"},
            "tracing": {"otlp_endpoint": "http://127.0.0.1:4317"},
            "step trace": {"step_trace": f"{directory}/none/trace"},
            "device": {"device": "cuda"},
            "context": {"max_model_len": 100_000},
        }


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Without OpenTelemetry, without a GPU."""
    directory = tmp_path_factory.mktemp("path")
    (directory / "opentelemetry.py").write_text("raise ModuleNotFoundError(name='opentelemetry')")
    unset = {setting.variable for setting in settings()}
    path = os.pathsep.join((str(directory), os.getcwd()))
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def said(environment: dict[str, str], verb: str, given: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "photon_grpc", verb, *as_flags(given)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def problems(refused: dict[str, dict[str, Any]], environment: dict[str, str]) -> list[str]:
    """Doctor's, told of all of them at once."""
    given: dict[str, Any] = {}
    for some in refused.values():
        given |= some
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        # What the environment lacks, in this process: one of doctor's own takes seconds.
        patch.setattr("torch.cuda.is_available", lambda: False)
        # Another test of this process may have imported it, and what imports it.
        for name in [each for each in sys.modules if each.partition(".")[0] == "opentelemetry"]:
            patch.delitem(sys.modules, name)
        patch.delitem(sys.modules, "photon_grpc.observe.spans", raising=False)
        patch.syspath_prepend(environment["PYTHONPATH"].partition(os.pathsep)[0])
        patch.setattr(doctor, "ask_torch", lambda: None)
        patch.setattr(doctor, "ask_start", check_start.report)
        assert main.main(["doctor", *as_flags(given)]) == 1
    lines = out.getvalue().splitlines()
    found = [line.partition("problem: ")[2] for line in lines if line.startswith("problem: ")]
    assert len(found) == len(refused)
    return found


@pytest.mark.parametrize("name", ["listen", "admin", "metrics", "tracing"])
def test_doctor_gives_the_reason_why_serve_does_not_start(
    name: str, refused: dict[str, dict[str, Any]], environment: dict[str, str], problems: list[str]
) -> None:
    served = said(environment, "serve", FREE | refused[name])
    lines = served.stderr.splitlines()
    assert served.returncode == 2, served.stderr
    assert lines[-1].partition("cannot start: ")[2] in problems
    # An address that is taken: before anything is loaded.
    assert len(lines) == 1 or name == "tracing"


@pytest.mark.parametrize("name", ["tls", "keys"])
async def test_doctor_gives_the_reason_why_a_front_end_does_not_start(
    name: str, refused: dict[str, dict[str, Any]], problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        async with access(resolve(refused[name], {}).config.server):
            pass
    assert str(caught.value) in problems


@pytest.mark.parametrize("name", ["step trace", "device", "context"])
def test_doctor_gives_the_reason_why_an_engine_does_not_start(
    name: str, refused: dict[str, dict[str, Any]], problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        assemble(resolve(FREE | refused[name], {}).config, lambda stage, done, total: None)
    assert str(caught.value) in problems


def test_a_drafter_that_does_not_fit_is_refused_before_weights_are_read() -> None:
    given = {"model": str(demo.DRAFT), "speculative_model": str(demo.EAGLE3)}
    config, stages = resolve(FREE | given, {}).config, list[str]()
    with pytest.raises(ConfigError) as caught:
        assemble(config, lambda stage, done, total: stages.append(stage))
    assert [str(caught.value)] == check_start.reasons(config)
    assert not stages


@pytest.mark.parametrize(
    ("drafter", "name"), [(demo.EAGLE3, "fc.weight"), (demo.DRAFT, "model.norm.weight")], ids=["head", "model"]
)
def test_a_tensor_that_a_drafter_lacks_is_found_without_loading(drafter: Path, name: str, tmp_path: Path) -> None:
    directory = shutil.copytree(drafter, tmp_path / "drafter")
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    config = resolve(FREE | {"speculative_model": str(directory)}, {}).config
    with pytest.raises(ConfigError, match=f"--speculative-model {directory}.*are missing.*{name}") as caught:
        assemble(config, lambda stage, done, total: None)
    assert [str(caught.value)] == check_start.reasons(config)


def test_a_wrong_value_of_a_quantized_draft_model_is_found_without_loading(tmp_path: Path) -> None:
    directory = shutil.copytree(demo.DRAFT, tmp_path / "draft")
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name.removesuffix("weight") + "weight_scale"] = scale
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": inputs | {"strategy": "channel", "dynamic": False}}
    quantized = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    quantized["config_groups"] = {"group_0": scheme | {"input_activations": inputs}}
    described = json.loads((directory / "config.json").read_text()) | {"quantization_config": quantized}
    (directory / "config.json").write_text(json.dumps(described))
    save_file(tensors, file)
    config = resolve(FREE | {"speculative_model": str(directory)}, {}).config
    assert check_start.reasons(config) == []
    tensors["model.layers.1.mlp.down_proj.weight_scale"][3] = -1.0
    save_file(tensors, file)
    with pytest.raises(
        ConfigError, match=f"--speculative-model {directory}.*down_proj.weight_scale: 1 of .* is -"
    ) as e:
        assemble(config, lambda stage, done, total: None)
    assert [str(e.value)] == check_start.reasons(config)


@pytest.mark.parametrize("name", ["tls", "keys", "step trace", "device"])
def test_serve_refuses_a_file_or_device_before_it_downloads_or_starts_anything(
    name: str,
    refused: dict[str, dict[str, Any]],
    problems: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("photon_grpc.config.download.fetch_model", lambda config: pytest.fail("it downloads"))
    monkeypatch.setattr("photon_grpc.config.cuda_device._has_device", lambda: False)
    assert main.main(["serve", *as_flags(FREE | refused[name])]) == 2
    assert capsys.readouterr().err.splitlines()[-1].partition("photon-grpc: cannot start: ")[2] in problems


def test_doctor_finds_nothing_where_serve_would_start_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes of seconds.
    monkeypatch.setattr(doctor, "ask_torch", lambda: None)
    monkeypatch.setattr(doctor, "ask_start", check_start.report)
    flags = as_flags(FREE | {"metrics_listen": "127.0.0.1:0", "step_trace": f"{tmp_path}/trace"})
    assert main.main(["doctor", *flags]) == 0
    assert list(tmp_path.iterdir()) == []
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["--max-connection-age", "unset", "default"] in lines
    assert ["--num-speculative-tokens", "unset", "default"] in lines
    assert "problem" not in shown


@pytest.mark.parametrize(("device", "shown"), [("cuda", "cuda, which is missing"), ("auto", "cpu")])
def test_doctor_does_not_list_a_missing_device_as_used(
    device: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ask_torch", lambda: {"cuda": None, "devices": []})
    monkeypatch.setattr(doctor, "ask_start", lambda config: StartReport([], ""))
    main.main(["doctor", "--listen", "127.0.0.1:0", "--device", device])
    assert ["serves", "on", *shown.split()] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_doctor_and_serve_report_one_address_in_two_spellings(
    environment: dict[str, str],
) -> None:
    given = FREE | {"listen": ("127.0.0.1:50999", "localhost:50999")}
    served = said(environment, "serve", given)
    assert served.returncode == 2, served.stderr
    (line,) = served.stderr.splitlines()
    found = check_start.reasons(resolve(given, {}).config)
    assert line.partition("cannot start: ")[2] in found


def test_a_check_that_breaks_is_a_reason_and_the_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(server: object) -> None:
        raise RuntimeError("of the machine")

    monkeypatch.setattr(check_start, "read_certificates", broken)
    found = check_start.reasons(resolve(FREE | {"api_keys_file": "/no/such/keys.toml"}, {}).config)
    assert any("RuntimeError" in reason and "of the machine" in reason for reason in found)
    assert any("/no/such/keys.toml" in reason for reason in found)


@pytest.mark.parametrize(
    ("printed", "reasons"),
    [
        ("print('a word of a module'); print('[[\"taken\"], \"\"]')", ["taken"]),
        ("print('[]'); print('a last word')", ["the start check failed"]),
        ("pass", ["the start check failed"]),
    ],
)
def test_doctor_finds_the_reasons_among_other_lines(
    printed: str, reasons: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport sys; sys.stdin.read()\n{printed}\n")
    python.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(python))
    found = doctor.ask_start(resolve(FREE, {}).config).problems
    assert [words in reason for words, reason in zip(reasons, found, strict=True)] == [True]


def test_doctor_works_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", "/no/such/python")
    (found,) = doctor.ask_start(resolve(FREE, {}).config).problems
    assert "the start check failed" in found and "/no/such/python" in found
