"""`serve`, `doctor` and `run` take what `config/flags.py` has, and nothing they do not need is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from photon_grpc import __version__, demo
from photon_grpc.cli import doctor, main, serve, server_libraries
from photon_grpc.cli.terminal import settings_flags
from photon_grpc.config.settings import Setting, sections, settings
from photon_grpc.service.processes import check_start
from photon_grpc.service.processes.start_report import StartReport


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings():
        monkeypatch.delenv(setting.variable, raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the ServeConfig that `serve` passes on, without reading files or starting a service."""
    monkeypatch.setattr("photon_grpc.service.processes.first_checks.check_first", lambda config: None)
    service = pytest.importorskip("photon_grpc.service.supervisor")
    configs: list[object] = []
    monkeypatch.setattr(service, "serve", lambda config: configs.append(config) or 7)
    return configs


def test_help_shows_every_flag_under_its_heading_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    for title, group in sections().items():
        assert f"{title}:" in lines
        for setting in group:
            assert setting.flag in shown or f"--[no-]{setting.flag[2:]}" in shown
    assert "[default: 127.0.0.1:50051]" in " ".join(shown.split())


@pytest.mark.parametrize(("verb", "own"), [("serve", "--help"), ("run", "--once"), ("doctor", "--json")])
def test_help_shows_the_argument_with_the_model_and_no_heading_for_the_rest(
    verb: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    options, _, rest = shown.partition("Options:\n")[2].partition("Model:\n")
    assert own in options and "DIR_OR_ID" not in options
    assert rest.split()[:5] == ["[DIR_OR_ID]", "The", "same", "as", "--model."]
    assert "Other:" not in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"photon-grpc {__version__}\n"


def test_serve_passes_on_flags_and_variables(
    served: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHOTON_BLOCK_SIZE", "8")
    monkeypatch.setenv("PHOTON_BLOCKSIZE", "8")
    flags = ["--max-num-seqs", "3", "--no-enable-prefix-caching", "--listen", "127.0.0.1:0", "--listen", "unix:/tmp/s"]
    assert main.main(["serve", *flags]) == 7
    (config,) = served
    assert config.scheduler.max_num_seqs == 3  # type: ignore[attr-defined]
    assert config.cache.block_size == 8  # type: ignore[attr-defined]
    assert config.cache.enable_prefix_caching is False  # type: ignore[attr-defined]
    assert config.server.listen == ("127.0.0.1:0", "unix:/tmp/s")  # type: ignore[attr-defined]
    assert "did you mean PHOTON_BLOCK_SIZE" in capsys.readouterr().err


def test_the_model_is_the_argument_too(served: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(demo.TARGET)
    for flags in ([directory], ["--model", directory], [directory, "--model", directory], ["--seed=1", directory]):
        assert main.main(["serve", *flags]) == 7
    assert {config.model.model for config in served} == {directory}  # type: ignore[attr-defined]
    assert main.main(["serve", directory, "--model", "other/model"]) == 2
    assert "two models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "is_warned"),
    [
        (["--listen", "0.0.0.0:0"], True),
        (["--listen", "[::]:0"], True),
        (["--listen", "box.example:0"], True),
        (["--http-listen", "0.0.0.0:0"], True),
        (["--http-listen", "127.0.0.1:0"], False),
        (["--http-listen", "0.0.0.0:0", "--api-keys-file", "keys.toml"], False),
        (["--listen", "0.0.0.0:0", "--api-keys-file", "keys.toml"], False),
        (["--listen", "0.0.0.0:0", "--tls-cert", "c.pem", "--tls-key", "k.pem"], False),
        (["--listen", "127.0.0.1:0", "--listen", "[::1]:0", "--listen", "localhost:0", "--listen", "unix:/s"], False),
    ],
)
def test_an_open_port_without_tls_and_keys_is_warned_about(
    served: list[object], flags: list[str], is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["serve", *flags]) == 7
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if f"{flags[1]} is served without TLS" in line] == (told if is_warned else [])
    assert len(told) == is_warned


@pytest.mark.parametrize(
    ("flags", "pointer"),
    [
        (["--port", "8000"], "--port; use --listen HOST:PORT"),
        (["--host=0.0.0.0"], "--host; use --listen HOST:PORT"),
        (["--port", "8000"], "--http-listen HOST:PORT for HTTP"),
        (["--allowed-origins", "[]"], "use --http-allowed-origin ORIGIN"),
        (["--api-key", "secret"], "use --api-keys-file"),
    ],
)
def test_flags_of_vllm_without_a_namesake_get_a_pointer(
    flags: list[str], pointer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["serve", *flags]) == 2
    assert pointer in capsys.readouterr().err
    assert main.main(["serve", "--no-such-flag"]) == 2
    assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--foo", []),
        ("--max-token", ["--max-tokens", "--min-tokens"]),
        ("--schema", ["--json-schema"]),
        ("--stop-string", ["--stop"]),
    ],
)
def test_only_near_names_are_suggested(flag: str, near: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["generate", "x", flag]) == 2
    told = capsys.readouterr().err.partition("No such option")[2].partition(flag)[2]
    assert re.findall(r"--[a-z-]+", told) == near


def changed_demo(directory: Path, **values: object) -> Path:
    """Copy the embedded model with these values in its config.json."""
    shutil.copytree(demo.TARGET, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))
    return directory


def test_doctor_names_what_is_wrong_with_a_model_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes of seconds.
    monkeypatch.setattr(doctor, "ask_torch", lambda: None)
    monkeypatch.setattr(doctor, "ask_start", check_start.report)
    monkeypatch.setenv("PHOTON_LISTEN", "127.0.0.1:0")
    directory = changed_demo(tmp_path / "shape", intermediate_size=1280)
    assert main.main(["doctor", str(directory)]) == 1
    assert "gate_proj.weight has shape [640, 256]" in " ".join(capsys.readouterr().out.split())
    assert main.main(["doctor", str(directory), "--load-format", "dummy"]) == 0
    (directory / "chat_template.jinja").write_text("{% for %}")
    assert main.main(["doctor", str(directory), "--load-format", "dummy"]) == 1
    (directory / "tokenizer.json").unlink()
    assert main.main(["doctor", str(directory), "--load-format", "dummy"]) == 0
    shown = capsys.readouterr().out.split("speaks")[-1]
    assert "no text" in shown and "chat" not in shown.splitlines()[0]
    other = changed_demo(tmp_path / "other", architectures=["MambaForCausalLM"])
    assert main.main(["doctor", str(other)]) == 1
    assert "supported: LlamaForCausalLM" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "told"), [("x.gguf", "x.gguf is GGUF"), ("pytorch_model.bin", "pickled"), ("README", "holds no model")]
)
def test_for_a_directory_of_another_format_the_supported_one_is_named(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).touch()
    assert main.main(["serve", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
    assert main.main(["serve", str(tmp_path / name)]) == 2
    assert "a model is a Hugging Face directory" in capsys.readouterr().err


NUMBERS = [setting for setting in settings() if setting.kind in (int, float) and not setting.choices]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_an_absurd_number_is_refused_in_one_line_before_anything_starts(
    setting: Setting, served: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("-1", "-0.5", "nan", "inf", "-inf", "1e400", str(2**64), str(10**30), "9" * 5000, "1_", "", " ", "٣x"):
        said = setting.flag + "=" + text
        assert main.main(["serve", said]) == 2, said
        captured = capsys.readouterr()
        assert captured.err.startswith(f"photon-grpc: {setting.flag}: "), said
        assert len(captured.err.splitlines()) == 1 and captured.out == ""
    assert not served


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_every_number_has_an_inclusive_upper_bound(
    setting: Setting, served: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert setting.bounds.at_most is not None
    # No grace goes without an age.
    monkeypatch.setenv("PHOTON_MAX_CONNECTION_AGE", "9")
    assert main.main(["serve", f"{setting.flag}={setting.kind(setting.bounds.at_most)}"]) == 7
    assert main.main(["serve", f"{setting.flag}={setting.kind(setting.bounds.at_most) + 1}"]) == 2
    assert len(served) == 1


@pytest.mark.parametrize("verb", ["serve", "doctor", "run"])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: must be a whole number, at least 1, at most 4096; got '0'"),
        (["--listen", "nowhere"], "--listen: 'nowhere'"),
        (["--model", "/no/such/directory"], "--model: no directory /no/such/directory"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(
    verb: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([verb, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"photon-grpc: {told}")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_without_the_server_libraries_serve_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_libraries, "SERVER_LIBRARIES", ("no_such_library_of_ours",))
    assert main.main(["serve"]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["serve", "run"])
def test_without_the_libraries_of_the_http_server_it_says_what_to_install(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_libraries, "HTTP_LIBRARIES", ("httptools", "no_such_library_of_ours"))
    assert main.main([verb, "--http-listen", "127.0.0.1:0"]) == 2
    told = capsys.readouterr().err
    assert "--http-listen needs more libraries (no_such_library_of_ours missing): pip install '.[http]'" in told
    assert len(told.splitlines()) == 1


def test_without_the_server_libraries_the_library_says_so_too() -> None:
    program = "import sys; sys.modules['msgspec'] = None\nfrom photon_grpc import LLM"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: LLM needs msgspec: pip install '.[serve]'" in done.stderr


def test_flags_are_the_same_in_another_process(served: list[object]) -> None:
    given = {
        "max_num_seqs": "3",
        "seed": None,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "listen": ("a:1", "b:2"),
    }
    flags = settings_flags.as_flags(given)
    assert main.main(["serve", *flags]) == 7
    with click.Context(serve.serve) as context:
        serve.serve.parse_args(context, list(flags))
        assert {name: context.params[name] for name in given} == given


#: `doctor` with the answers of the two processes that it starts, each of which imports torch for seconds.
DOCTOR = """
import subprocess
from photon_grpc.cli.main import main
TORCH, START = '{"cuda": null, "threads": 1, "devices": []}', '[[], ""]'
subprocess.run = lambda *_, **given: subprocess.CompletedProcess((), 0, START if "input" in given else TORCH)
assert main(["doctor", "--listen", "127.0.0.1:0"]) == 0
"""


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import photon_grpc.cli.main", ["grpc", "torch", "rich", "google"]),
        ("from photon_grpc.cli.main import main; main(['serve', '--help'])", ["grpc", "torch", "rich"]),
        pytest.param(DOCTOR, ["torch", "transformers"], id="doctor"),
        ("import photon_grpc.client, photon_grpc.cli.terminal.terminal", ["torch", "numpy", "msgspec", "tokenizers"]),
        (
            "import photon_grpc.cli.bench, photon_grpc.cli.load.load_client",
            ["torch", "numpy", "msgspec", "tokenizers", "rich"],
        ),
        ("import photon_grpc.cli.doctor, photon_grpc.cli.first_run", ["torch", "numpy", "msgspec"]),
    ],
)
def test_what_a_verb_does_not_need_is_not_loaded(program: str, absent: list[str]) -> None:
    check = f"{program}\nimport json, sys\nprint()\nprint(json.dumps(sorted(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    loaded = json.loads(shown.splitlines()[-1])
    assert "photon_grpc" in loaded
    assert not set(absent) & set(loaded)


@pytest.mark.parametrize(
    ("windows", "told"),
    [
        ((0, 0), ""),
        ((512, 0, 512), "; 2 of 3 layers attend the last 512"),
        ((4096,), "; 1 of 1 layers attend the last 4,096"),
    ],
)
def test_doctor_describes_attention_windows(windows: tuple[int, ...], told: str) -> None:
    assert doctor._windows(windows) == told


def test_doctor_shows_values_and_where_they_come_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PHOTON_DTYPE", "float32")
    monkeypatch.setenv("PHOTON_DTYP", "float32")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(doctor, "ask_torch", lambda: None)
    monkeypatch.setattr(doctor, "ask_start", lambda config: StartReport([], ""))
    flags = ["--max-num-seqs", "5", "--listen", f"unix:{tmp_path}/s", "--http-listen", "127.0.0.1:0"]
    assert main.main(["doctor", *flags]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["--dtype", "float32", "PHOTON_DTYPE"] in rows
    assert ["--max-num-seqs", "5", "--max-num-seqs"] in rows
    assert ["--block-size", "decided", "at", "start", "default"] in rows
    assert [f"unix:{tmp_path}/s", "free"] in rows
    assert ["127.0.0.1:0", "(HTTP)", "any", "free", "port"] in rows
    assert any("pip install '.[serve]'" in " ".join(row) for row in rows)
    assert any("did you mean PHOTON_DTYPE?" in " ".join(row) for row in rows)
    for setting in settings():
        assert any(row[:1] == [setting.flag] for row in rows), setting.name


def test_doctor_shows_what_config_json_and_the_device_decide_also_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ask_torch", lambda: {"cuda": None, "devices": []})
    monkeypatch.setattr(
        doctor, "ask_start", lambda config: StartReport(["taken"] if config.server.frontends == 2 else [], "")
    )
    directory = changed_demo(tmp_path / "model", max_position_embeddings=1234, dtype="bfloat16")
    given = ["doctor", str(directory), "--listen", "127.0.0.1:0", "--max-num-seqs", "7"]
    assert main.main([*given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["--dtype"] == {"value": "bfloat16", "from": "config.json"}
    assert told["settings"]["--max-model-len"] == {"value": 1234, "from": "config.json"}
    assert told["settings"]["--block-size"] == {"value": 16, "from": "cpu"}
    assert told["settings"]["--max-num-seqs"] == {"value": 7, "from": "--max-num-seqs"}
    assert told["settings"].keys() == {setting.flag for setting in settings()}
    assert told["runs_on"]["serves on"] == "cpu" and told["problems"] == []
    assert main.main([*given, "--json", "--frontends", "2"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == ["taken"]
    assert main.main([*given, "--max-model-len", "9", "--dtype", "float32"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["--max-model-len", "9", "--max-model-len"] in rows and ["--dtype", "float32", "--dtype"] in rows


def test_doctor_lists_every_problem_besides_a_directory_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ask_torch", lambda: None)
    monkeypatch.setattr(doctor, "ask_start", check_start.report)
    given = [str(tmp_path), "--listen", "127.0.0.1:0", "--api-keys-file", "/no/keys", "--max-model-len", "100000"]
    assert main.main(["doctor", *given]) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert [("/no/keys" in line, "holds no model" in line) for line in problems] == [(True, False), (False, True)]
    assert main.main(["serve", *given]) == 2


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("photon-grpc serve --dty", ["plain,--dtype"]),
        ("photon-grpc serve --dtype b", ["plain,bfloat16"]),
        ("photon-grpc serve ./mod", ["dir,./mod"]),
        ("photon-grpc serve --tls-cert ser", ["file,ser"]),
        ("photon-grpc conv", ["plain,convert"]),
        ("photon-grpc convert ./mod", ["dir,./mod"]),
    ],
)
def test_the_shell_completes_flags_choices_and_paths(words: str, offered: list[str]) -> None:
    environment = {**os.environ, "_PHOTON_GRPC_COMPLETE": "bash_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split()) - 1)
    program = "import sys; from photon_grpc.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == offered, done.stderr
