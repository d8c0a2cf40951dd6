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
from tests.client.described import NAME, descriptor_set
from tests.client.fake_server import Refusal, error_info, message, serving_in_a_thread

EOS = pb.FINISH_REASON_EOS
HI = [message("hi", start=True, finish=EOS)]


def test_a_chat_keeps_its_turns_until_reset_and_its_instructions_beyond(
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


def test_a_chat_continues_after_a_refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    long = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too long", [error_info("PROMPT_TOO_LONG")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("much\nless\n"))
    with serving_in_a_thread([long], [message("hi", start=True, finish=EOS)]) as fake:
        assert main.main(["chat", "--target", fake.target]) == 0
    assert [turn.content for turn in fake.requests[1].chat.messages] == ["less"]
    captured = capsys.readouterr()
    assert "PROMPT_TOO_LONG: too long (/reset starts over)" in captured.err
    assert captured.out == "hi\n"


def chat(typed: str, monkeypatch: pytest.MonkeyPatch) -> list[pb.GenerateRequest]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    with serving_in_a_thread(HI) as fake:
        assert main.main(["chat", "--target", fake.target, "--max-tokens", "9"]) == 0
    return fake.requests


def test_set_changes_options_and_restores_their_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "/set temperature 0.25\n/set ignore_eos on\n/set max_tokens\na\n/set temperature\nb\n"
    first, second = chat(typed, monkeypatch)
    assert (first.sampling.temperature, first.stop.ignore_eos, first.stop.HasField("max_tokens")) == (0.25, True, False)
    assert not second.sampling.HasField("temperature")
    assert "temperature 0.25 · ignore_eos True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "constraint"),
    [
        ("--json-schema FILE", "json_schema"),
        ("--json-object", "json_object"),
        ("--regex a+", "regex"),
        ("--choice yes --choice no", "choices"),
        ("--grammar FILE", "grammar"),
        (f"--protobuf SET {NAME}", "protobuf"),
    ],
)
def test_an_answer_can_be_constrained(
    flags: str, constraint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "FILE").write_text("{}")
    (tmp_path / "SET").write_bytes(descriptor_set())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    with serving_in_a_thread(HI) as fake:
        assert main.main(["chat", "--target", fake.target, *flags.split()]) == 0
    assert fake.requests[0].structured_output.WhichOneof("constraint") == constraint


def test_set_reads_json_where_an_option_is_more_than_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = '/set logit_bias {"42": -1.5}\n/set stop_token_ids [5, 17]\n/set stop_strings ["a b", "c"]\n'
    typed += '/set labels {"team": "search"}\n/set json_schema {"type": "integer"}\nhi\n'
    (request,) = chat(typed, monkeypatch)
    assert dict(request.sampling.logit_bias) == {42: -1.5} and dict(request.labels) == {"team": "search"}
    assert (list(request.stop.stop_token_ids), list(request.stop.stop_strings)) == ([5, 17], ["a b", "c"])
    assert request.structured_output.json_schema == '{"type": "integer"}'


def test_setting_a_constraint_replaces_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set.binpb").write_bytes(descriptor_set())
    typed = '/set choices ["yes", "no"]\na\n'
    typed += f"/set json_object off\nd\n/set message_type {tmp_path}/set.binpb {NAME}\nb\n/set message_type\nc\n"
    choices, kept, message_type, plain = chat(typed, monkeypatch)
    assert kept.structured_output == choices.structured_output, "what is switched off takes no place"
    assert list(choices.structured_output.choices.values) == ["yes", "no"]
    assert message_type.structured_output.protobuf.message_type == NAME
    assert not plain.HasField("structured_output")
    assert f"message_type {NAME}\n" in capsys.readouterr().err


def test_a_call_is_shown_and_its_answer_is_a_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.json").write_text('[{"name": "weather"}]')
    script = [message("<tool_call>…", start=True, finish=EOS)]
    arguments = '{"city": "Z\u00fcrich\x1b"}'
    script[0].deltas[0].tool_calls.add(index=0, name="weather", arguments_json=arguments, id="aZ09bcdef")
    monkeypatch.setattr(sys, "stdin", io.StringIO("umbrella?\n/set tool_choice\n/tool rain\n"))
    with serving_in_a_thread(script, HI) as fake:
        fake.features.extend([model_pb2.FEATURE_TOOL_CALLS, model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED])
        flags = ["--tools", str(tmp_path / "tools.json"), "--template-args", "{}", "--tool-choice", "required"]
        assert main.main(["chat", "--target", fake.target, *flags]) == 0
    asked, answered = fake.requests
    assert (list(asked.chat.tools), asked.chat.template_args_json) == ([pb.Tool(name="weather")], "{}")
    assert asked.chat.tool_choice.HasField("required") and not answered.chat.HasField("tool_choice")
    _, call, tool = answered.chat.messages
    assert (call.role, call.content, tool.role, tool.content) == ("assistant", "", "tool", "rain")
    (sent_back,) = call.tool_calls
    assert (sent_back.name, sent_back.arguments_json) == ("weather", arguments)
    assert sent_back.id == tool.tool_call_id == "aZ09bcdef"
    assert 'call aZ09bcdef weather {"city": "Zürich␛"}' in capsys.readouterr().err


def test_a_chat_continues_with_the_first_of_several_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/set num_outputs 2\na\nb\n"))
    script = [message("one", start=True), message("other", index=1, finish=EOS), message("", finish=EOS)]
    with serving_in_a_thread(script) as fake:
        assert main.main(["chat", "--target", fake.target]) == 0
    assert fake.requests[1].chat.messages[1].content == "one"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temprature 1", "there is no option temprature; did you mean temperature?"),
        ("/set temperature hot", "temperature must be a number, got 'hot'"),
        ("/set top_k 0", "sampling.top_k: must be -1 (off) or lie between 1 and 2147483647, is 0"),
        ("/set top_p 1.5", "sampling.top_p: must be above 0 and at most 1, is 1.5"),
        ('/set logit_bias {"42": 200}', "sampling.logit_bias[42]: must lie between -100 and 100, is 200"),
        ("/set ignore_eos maybe", "ignore_eos must be on or off, got 'maybe'"),
        ("/set logit_bias 1", "logit_bias must be a JSON object of ids: {\"42\": -1.5}, got '1'"),
        ('/set labels {"a": 1}', 'labels must be a JSON object of texts: {"team": "search"}'),
        ('/set stop_strings "a"', 'stop_strings must be a JSON list of texts: ["a", "b"]'),
        ("/set stop_token_ids [true]", "stop_token_ids must be a JSON list of ids: [5, 17]"),
        ("/set json_schema {", "json_schema must be a JSON Schema, got '{'"),
        ("/set message_type /no/such/set acme.v1.Invoice", "message_type must be the file of a FileDescriptorSet"),
        ("/tool rain", "no tool call is waiting for an answer"),
        ("/foo", "there is no /foo; /help lists the commands"),
        ("/rest", "there is no /rest; did you mean /reset?"),
        ("/save", "/save needs the name of a file"),
        ("/save /no/such/place", "not saved: "),
    ],
)
def test_a_wrong_command_is_reported_and_the_conversation_continues(
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
            assert process.wait() == 0
        os.close(ours)
    asked = [request.chat.messages[-1].content for request in fake.requests]
    assert asked == ["def f():\n    return 1", "first\nsecond", "def f():\n    return 1"]
    assert (tmp_path / "photon-grpc" / "chat_history").stat().st_mode & 0o777 == 0o600


def read_until(terminal: int, seen: bytes, wanted: bytes, answers: int) -> bytes:
    """Return the terminal's bytes once it shows the prompt after `answers` answers."""
    end_s = time.monotonic() + 240
    while seen.count(b"tokens \xc2\xb7 first") < min(answers, 3) or wanted not in seen.rsplit(b"tokens", 1)[-1]:
        assert time.monotonic() < end_s, seen
        seen += os.read(terminal, 65536)
    return seen
