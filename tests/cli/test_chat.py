"""`chat` against the real wire: what is remembered, what the commands do, what the terminal does with keys."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from photon_grpc.cli import main
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2
from tests.cli.test_generate import scored_script
from tests.client.fake_server import Refusal, error_info, message, serving_in_a_thread

EOS = pb.FINISH_REASON_EOS
HI = [message("hi", start=True, finish=EOS)]


def test_a_chat_remembers_forgets_and_keeps_its_instructions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "hello\n\n/system be brief\nand now?\n/reset\nagain\n/help\n/quit\nnever sent\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    with serving_in_a_thread([message("hi", start=True, finish=EOS)]) as fake:
        assert main.main(["chat", "--target", fake.target, "--max-tokens", "9"]) == 0
    turns = [[(turn.role, turn.content) for turn in request.chat.messages] for request in fake.requests]
    assert turns == [
        [("user", "hello")],
        [("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "and now?")],
        [("system", "be brief"), ("user", "again")],
    ]
    captured = capsys.readouterr()
    assert captured.out == "hi\nhi\nhi\n"
    assert "/system TEXT" in captured.err


def test_a_chat_shows_the_scores_of_every_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    with serving_in_a_thread(scored_script()) as fake:
        assert main.main(["chat", "--target", fake.target, "--logprobs", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "def\n" and "-0.500      1  'de'" in captured.err
    assert fake.requests[0].output.logprobs == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def reasoned_script() -> list[pb.StreamGenerateResponse]:
    parts = [
        ("<think>\nhm", "\nhm", ""),
        ("\n\nso\n", "\n\nso\n", ""),
        ("</think>\n\n", "", "\n\n"),
        ("Yes. ", "", "Yes. "),
    ]
    script = []
    for text, reasoning, content in [*parts, ("Well", "", "Well")]:
        script.append(message(text, start=not script, finish=EOS if text == "Well" else 0))
        script[-1].deltas[0].reasoning, script[-1].deltas[0].content = reasoning, content
    return script


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_chat_shows_reasoning_dimmed_and_forgets_it(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand now?\n"))
    if is_terminal:
        monkeypatch.setattr(sys, "stderr", Terminal())
    with serving_in_a_thread(reasoned_script()) as fake:
        fake.features.append(model_pb2.FEATURE_REASONING)
        assert main.main(["chat", "--target", fake.target]) == 0
        captured = capsys.readouterr()
        told = sys.stderr.getvalue() if isinstance(sys.stderr, Terminal) else captured.err
    assert captured.out == "Yes. Well\n" * 2
    first = told.splitlines(keepends=True)[1:4]
    dimmed = ["\x1b[2mhm\x1b[0m\x1b[2m\n", "\n", "so\x1b[0m\n"]
    assert first == (dimmed if is_terminal else ["hm\n", "\n", "so\n"])
    turns = [(turn.role, turn.content) for turn in fake.requests[1].chat.messages]
    assert turns[1] == ("assistant", "Yes. Well")


def test_a_chat_goes_on_after_a_refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    long = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too long", [error_info("PROMPT_TOO_LONG")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("much\nless\n"))
    with serving_in_a_thread([long], [message("hi", start=True, finish=EOS)]) as fake:
        assert main.main(["chat", "--target", fake.target]) == 0
    assert [turn.content for turn in fake.requests[1].chat.messages] == ["less"]
    captured = capsys.readouterr()
    assert "PROMPT_TOO_LONG: too long (/reset makes room)" in captured.err
    assert captured.out == "hi\n"


def chat(typed: str, monkeypatch: pytest.MonkeyPatch) -> list[pb.GenerateRequest]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    with serving_in_a_thread(HI) as fake:
        assert main.main(["chat", "--target", fake.target, "--max-tokens", "9"]) == 0
    return fake.requests


def test_set_changes_options_and_gives_them_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "/set temperature 0.25\n/set ignore_eos on\n/set max_tokens\na\n/set temperature\nb\n"
    first, second = chat(typed, monkeypatch)
    assert (first.sampling.temperature, first.stop.ignore_eos, first.stop.HasField("max_tokens")) == (0.25, True, False)
    assert not second.sampling.HasField("temperature")
    assert "temperature 0.25 · ignore_eos True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temprature 1", "there is no option temprature; did you mean temperature?"),
        ("/set temperature hot", "temperature takes a number, not 'hot'"),
        ("/set ignore_eos maybe", "ignore_eos takes on or off, not 'maybe'"),
        ("/set logit_bias 1", "there is no option logit_bias"),
        ("/rest", "there is no /rest; did you mean /reset?"),
        ("/save", "/save takes a file's name"),
        ("/save /no/such/place", "not saved: "),
    ],
)
def test_a_wrong_command_is_told_and_the_conversation_goes_on(
    line: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(chat(f"{line}\nhello\n", monkeypatch)) == 1
    assert told in capsys.readouterr().err


def test_save_writes_messages_that_can_be_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.json"
    chat(f"/system be brief\nhällo 👩‍💻\n/save {path}\n", monkeypatch)
    assert json.loads(path.read_text(encoding="utf-8")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hällo 👩‍💻"},
        {"role": "assistant", "content": "hi"},
    ]


def test_lines_pasted_at_a_terminal_are_one_message_and_typed_ones_are_remembered(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    keys = [
        "\x1b[200~def f():\n    return 1\x1b[201~\r",  # pasted
        "first\x1b\rsecond\r",  # Alt-Enter
        "\x1b[A\x1b[A\x1b[A\r",  # up to the last message, over its two lines, to the one before
        "never sent\x03",
        "\x04",
    ]
    with serving_in_a_thread(HI) as fake:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "photon_grpc", "chat", "--target", fake.target]
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            seen = b""
            for number, pressed in enumerate(keys):
                seen = read_until(ours, seen, "›".encode(), number)
                os.write(ours, pressed.encode())
            assert process.wait(30) == 0
        os.close(ours)
    asked = [request.chat.messages[-1].content for request in fake.requests]
    assert asked == ["def f():\n    return 1", "first\nsecond", "def f():\n    return 1"]
    assert (tmp_path / "photon-grpc" / "chat_history").stat().st_mode & 0o777 == 0o600


def read_until(terminal: int, seen: bytes, wanted: bytes, answers: int) -> bytes:
    """The screen's bytes once the prompt stands there after so many answers."""
    end_s = time.monotonic() + 30
    while seen.count(b"tokens \xc2\xb7 first") < min(answers, 3) or wanted not in seen.rsplit(b"tokens", 1)[-1]:
        assert time.monotonic() < end_s, seen
        seen += os.read(terminal, 65536)
    return seen
