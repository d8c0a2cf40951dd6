"""Whatever stands on the command line, on stdin or in a file: one line for the person, an exit code, no traceback."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from photon_grpc import __main__ as entry
from photon_grpc.cli import main
from photon_grpc.v1 import inference_pb2 as pb
from tests.client.fake_server import FakeServer, message, serving_in_a_thread

#: As Python holds bytes of a command line that are no UTF-8.
NO_TEXT = "\udcff\udc80"
CALLS = (["generate", "x", "--timeout", "1"], ["chat", "--timeout", "1"], ["bench", "--requests", "1"])
VERBS = ("generate", "chat", "bench", "serve", "doctor", "run")


class Said:
    """What a run said: its exit code and stderr."""

    def __init__(self, arguments: list[str], stdin: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        given = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        with monkeypatch.context() as patch:
            for name, stream in (("stdin", given), ("stdout", out), ("stderr", err)):
                patch.setattr(sys, name, stream)
            self.code = main.main(arguments)
        err.seek(0)
        self.text = err.read()
        assert "Traceback" not in self.text

    def refused(self, *words: str) -> None:
        assert self.code == 2, self.text
        assert all(word in self.text for word in words), self.text
        assert sum(line.startswith("photon-grpc: ") for line in self.text.splitlines()) == 1


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    script = [message("def ", start=True), message("fib", finish=pb.FINISH_REASON_MAX_TOKENS)]
    with serving_in_a_thread(script) as fake:
        yield fake


@pytest.mark.parametrize("verb", ["generate", "chat"])
@pytest.mark.parametrize(
    ("stdin", "word"),
    [(b"\xff\xfe", "not utf-8 text"), (b"hi\n/system \xf0\x9f\nmore\n", "not utf-8 text"), (None, "closed")],
)
def test_stdin_that_is_not_text_is_refused(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, verb: str, stdin: bytes | None, word: str
) -> None:
    arguments = ["generate", "-"] if verb == "generate" else ["chat"]
    Said([*arguments, "--target", fake.target], stdin, monkeypatch).refused("stdin", word)
    assert verb == "chat" or fake.requests == []


def test_an_empty_stdin_is_an_empty_prompt(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Said(["generate", "-", "--target", fake.target], b"", monkeypatch).code == 0
    assert Said(["chat", "--target", fake.target], b"", monkeypatch).code == 0
    assert [request.text for request in fake.requests] == [""]


@pytest.mark.parametrize("verb", VERBS)
def test_an_argument_that_is_not_text_is_refused(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    for arguments in ([verb, NO_TEXT], [verb, "--model", NO_TEXT], [verb, f"--{NO_TEXT}"], [NO_TEXT]):
        Said(arguments, b"", monkeypatch).refused("not text", r"\udcff\udc80")
    monkeypatch.setenv("PHOTON_TARGET", NO_TEXT)
    Said([verb, "--help"], b"", monkeypatch).refused("not text")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
@pytest.mark.parametrize(
    "target", ["", ":::", "a\0b", "x" * 3000, "http://a b/", "dns:///", "127.0.0.1:99999", "ipv4:1.2.3.4:5:6"]
)
def test_an_invalid_target_is_refused(monkeypatch: pytest.MonkeyPatch, call: list[str], target: str) -> None:
    assert Said([*call, "--target", target], b"hi\n", monkeypatch).code in (1, 2)


@pytest.mark.parametrize(
    "flags",
    [
        ["--seed", str(2**70)],
        ["--seed", "-1"],
        ["--top-k", str(2**70)],
        ["--max-tokens", str(2**70)],
        ["--timeout", "1e300"],
        ["--timeout", "nan"],
    ],
    ids=" ".join,
)
def test_a_number_too_large_for_its_field_is_refused(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    said = Said(["generate", "x", *flags, "--target", fake.target], b"", monkeypatch)
    assert said.code in (1, 2)
    assert flags[0][2:].replace("-", "_") in said.text
    assert fake.requests == []


@pytest.fixture
def odd_files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x80")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "broken.jsonl").write_text("[[[[\n")
    (tmp_path / "object.jsonl").write_text('{"prompt": {}}\n')
    (tmp_path / "directory").mkdir()
    return {path.name: path for path in tmp_path.iterdir()} | {
        "nothing": tmp_path / "nothing",
        "unreadable": Path("/proc/self/mem"),
        "long": Path("x" * 5000),
    }


def test_an_invalid_prompt_file_is_refused(
    fake: FakeServer, odd_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in odd_files.values():
        Said(["bench", "--target", fake.target, "--prompt-file", str(path)], b"", monkeypatch).refused("--prompt-file")
    assert fake.requests == []


@pytest.mark.parametrize("verb", ["serve", "doctor", "run"])
def test_an_invalid_model_is_refused(verb: str, odd_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # doctor tells all that is wrong beside a directory without a model.
    directories = {} if verb == "doctor" else {"root": Path("/"), "directory": odd_files["directory"]}
    del odd_files["directory"]
    for path in (*(odd_files | directories).values(), "a\0b"):
        Said([verb, "--model", str(path)], b"", monkeypatch).refused("--model" if path != "a\0b" else "not text")
    for variable in ("PHOTON_MODEL", "PHOTON_SERVED_MODEL_NAME", "PHOTON_LISTEN", "PHOTON_NUM_BLOCKS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, NO_TEXT)
            Said([verb], b"", patch).refused(variable)


def test_stdout_that_lacks_characters_or_is_closed_is_no_failure(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script = ([message("é🙂", start=True, finish=pb.FINISH_REASON_MAX_TOKENS)],)
    for stream in (io.TextIOWrapper(io.BytesIO(), encoding="ascii"), None):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main.main(["generate", "x", "--target", fake.target]) == 0


@pytest.mark.parametrize("locale", ["C.UTF-8", "POSIX"])
def test_invalid_bytes_on_stdin_are_one_line_in_permissive_locales(locale: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "photon_grpc", "generate", "-"],
        input=b"\xff\xfe\x00",
        env=os.environ | {"LC_ALL": locale},
        capture_output=True,
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr and b"not utf-8 text" in done.stderr


def run_with_click(source: str, directory: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """`--version` with a stand-in for the first library that the command line imports."""
    (directory / "click.py").write_text(source)
    command = [sys.executable, "-m", "photon_grpc", "--version"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(directory), os.getcwd()))}
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def test_ctrl_c_amid_the_imports_prints_no_traceback(tmp_path: Path) -> None:
    done = run_with_click("import os, signal\nos.kill(os.getpid(), signal.SIGINT)", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_outside_every_verb_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(sys.modules["photon_grpc.cli.main"], "main", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert entry.main() == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_package_itself_imports_no_typing() -> None:
    """Ctrl-C while it is imported is a traceback: it is imported in no time."""
    script = "import sys, photon_grpc; print('typing' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_ctrl_c_is_still_ignored_in_the_background(tmp_path: Path) -> None:
    source = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('goes on', flush=True)\nos._exit(0)"
    done = run_with_click(source, tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stdout) == (0, "goes on\n")
