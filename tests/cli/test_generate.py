"""`generate` and `chat` over gRPC: text on stdout, everything else on stderr, failures as exit codes."""

from __future__ import annotations

import base64
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import Parse

from photon_grpc.cli import main
from photon_grpc.cli.generate import generate
from photon_grpc.cli.terminal.printable import printable
from photon_grpc.cli.terminal.terminal import Stopwatch
from photon_grpc.client import Options, Timing, Usage
from photon_grpc.client.message_type import find_message_type
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2
from tests.client.described import NAME, descriptor_set
from tests.client.fake_server import FakeServer, Refusal, error_info, message, serving_in_a_thread, typed

EOS, MAX_TOKENS = pb.FINISH_REASON_EOS, pb.FINISH_REASON_MAX_TOKENS
SCRIPT = [message("def ", start=True), message("fib", finish=MAX_TOKENS)]


def test_text_goes_to_stdout_and_the_summary_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_a_thread(SCRIPT) as fake:
        assert main.main(["generate", "x", "--target", fake.target]) == 0
    captured = capsys.readouterr()
    assert captured.out == "def fib\n"
    assert captured.err.startswith("3 tokens · first after ")
    assert captured.err.endswith("MAX_TOKENS\n")


def test_the_api_key_of_the_environment_goes_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_in_a_thread(SCRIPT) as fake:
        assert main.main(["generate", "x", "--target", fake.target]) == 0
        monkeypatch.setenv("PHOTON_API_KEY", "secret")
        assert main.main(["generate", "x", "--target", fake.target]) == 0
    assert [call.get("authorization") for call in fake.metadata] == [None, "Bearer secret"]


def test_flags_are_written_into_the_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    flags = "--max-tokens 5 --temperature 0 --top-p 0.5 --top-k -1 --min-p 0.1 --seed 3 --stop a --stop b --model m"
    flags += " --repetition-penalty 1.5 --presence-penalty -1 --frequency-penalty 0.25"
    with serving_in_a_thread(SCRIPT) as fake:
        monkeypatch.setenv("PHOTON_TARGET", fake.target)
        assert main.main(["generate", "-", *flags.split()]) == 0
        assert main.main(["generate", "hi", "--system", "be brief"]) == 0
        flags = "--logit-bias 4=-1.5 --logit-bias 5=2 --allowed-token-id 7 --score-token-id 8 --session-id s"
        flags += " --label team=search --label zone=a=b"
        assert main.main(["generate", "x", *flags.split()]) == 0
        assert main.main(["generate", "x", "--logit-bias", "four"]) == 2
        assert main.main(["generate", "x", "--label", "team"]) == 2
    told = capsys.readouterr().err
    assert "'four' is not ID=X" in told and "'team' is not KEY=VALUE" in told
    request, chat, shaped = fake.requests
    assert dict(shaped.sampling.logit_bias) == {4: -1.5, 5: 2.0} and shaped.cache.session_id == "s"
    assert (list(shaped.sampling.allowed_token_ids.ids), list(shaped.output.score_token_ids.ids)) == ([7], [8])
    assert dict(shaped.labels) == {"team": "search", "zone": "a=b"}
    assert request.text == "from stdin"
    assert request.model == "m"
    assert request.stop.max_tokens == 5
    assert list(request.stop.stop_strings) == ["a", "b"]
    assert request.sampling.HasField("temperature")
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0, -1, 3)
    penalties = request.sampling
    assert (penalties.repetition_penalty, penalties.presence_penalty, penalties.frequency_penalty) == (1.5, -1, 0.25)
    assert [(turn.role, turn.content) for turn in chat.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert not chat.HasField("sampling")


def test_flags_of_stops_constraints_and_the_service_are_written_into_the_request(tmp_path: Path) -> None:
    (tmp_path / "set").write_bytes(descriptor_set())
    flags = "--min-tokens 2 --stop-token-id 5 --stop-token-id 6 --ignore-eos --include-stop-in-text --max-duration 1.5"
    flags += " --keep-special-tokens --token-ids --prompt-token-ids --parse-special-tokens --continue-from 7,8"
    flags += " --salt s --bypass-prefix-cache --priority -1 --max-queue-duration 2 --request-id r --json-object"
    with serving_in_a_thread(SCRIPT) as fake:
        assert main.main(["generate", "x", "--target", fake.target, *flags.split()]) == 0
        assert main.main(["generate", "x", "--target", fake.target, "--protobuf", f"{tmp_path}/set", NAME]) == 0
        assert main.main(["generate", "x", "--target", fake.target, "--template-args", "{}"]) == 0
    request, typed, chat = fake.requests
    expected = pb.GenerateRequest(text="x", request_id="r", continue_from={"ids": [7, 8]}, parse_special_tokens=True)
    expected.stop.MergeFrom(
        pb.StopParams(min_tokens=2, stop_token_ids=[5, 6], ignore_eos=True, include_stop_in_text=True)
    )
    expected.stop.max_duration.FromMilliseconds(1500)
    expected.output.MergeFrom(pb.OutputOptions(skip_special_tokens=False, token_ids=True, prompt_token_ids=True))
    expected.cache.MergeFrom(pb.CacheOptions(salt="s", bypass_prefix_cache=True))
    expected.scheduling.priority = -1
    expected.scheduling.max_queue_duration.FromSeconds(2)
    expected.structured_output.json_object.SetInParent()
    assert request == expected
    assert typed.structured_output.protobuf.message_type == NAME
    assert (chat.chat.messages[0].content, chat.chat.template_args_json) == ("x", "{}")


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_help_explains_the_flags_of_chats_where_they_make_a_chat(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([verb, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "implies" not in shown
    assert ("--system, --tools, --tools-json and --template-args do so, too." in shown) == (verb == "generate")


def test_every_option_has_a_flag() -> None:
    flags = {{"protobuf": "message_type"}.get(str(each.name), each.name) for each in generate.params}
    # What gathers in a message is not seen at a terminal, and a prompt is answered.
    assert Options.__annotations__.keys() - flags == {
        *("text", "min_interval", "max_tokens_per_message", "continuous_usage", "add_generation_prompt"),
        "heartbeat_interval",
    }


@pytest.mark.parametrize("verb", ["generate", "chat", "batch"])
def test_an_invalid_message_type_is_refused_before_the_call(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").write_bytes(descriptor_set())
    (tmp_path / "in.jsonl").write_text('"x"\n')
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    arguments = {"generate": ["x"], "chat": [], "batch": [f"{tmp_path}/in.jsonl", f"{tmp_path}/out.jsonl"]}[verb]
    with serving_in_a_thread(SCRIPT) as fake:
        command = [verb, *arguments, "--target", fake.target, "--protobuf"]
        assert main.main([*command, f"{tmp_path}/set", "acme.v1.None"]) == 2
        assert main.main([*command, f"{tmp_path}/nothing", NAME]) == 2
    assert "--protobuf: the set has no message 'acme.v1.None'" in capsys.readouterr().err
    assert fake.requests == []


def scored_script() -> list[pb.StreamGenerateResponse]:
    script = [message("de", start=True), message("f", finish=EOS)]
    script[0].start.prompt.scores.add(token_id=4, token_bytes=b"\x1b[2J")
    for part, token in zip(script, (b"de", b"f"), strict=True):
        score = part.deltas[0].scores.add(token_id=5, logprob=-0.5, rank=1, token_bytes=token)
        score.candidates.add(token_id=6, logprob=-1.25, rank=2)
    return script


def test_scores_are_lines_on_stderr_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_a_thread(scored_script()) as fake:
        flags = ["--logprobs", "1", "--prompt-logprobs", "0", "--target", fake.target]
        assert main.main(["generate", "x", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == "def\n"
    lines = captured.err.splitlines()
    assert [line.split() for line in (lines[1], lines[3], lines[4])] == [
        ["'\\x1b[2J'"],
        ["-0.500", "1", "'de'", "\u00b7", "6", "-1.250"],
        ["-0.500", "1", "'f'", "\u00b7", "6", "-1.250"],
    ]
    (request,) = fake.requests
    assert request.output.HasField("prompt_logprobs") and request.output.logprobs == 1


def test_bytes_of_tokens_are_base64_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_a_thread(scored_script()) as fake:
        assert main.main(["generate", "x", "--json", "--logprobs", "1", "--target", fake.target]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (score,) = lines[0]["scores"]
    assert (score["token_bytes"], score["logprob"], score["candidates"][0]["token_id"]) == ("ZGU=", -0.5, 6)


def test_a_message_is_base64_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set").write_bytes(descriptor_set())
    script = [message('{"number":"17"}', start=True, finish=EOS)]
    made = Parse(script[0].deltas[0].text, find_message_type(descriptor_set(), NAME)())
    script[0].deltas[0].message.CopyFrom(typed(made))
    with serving_in_a_thread(script) as fake:
        flags = ["--json", "--protobuf", f"{tmp_path}/set", NAME, "--target", fake.target]
        assert main.main(["generate", "x", *flags]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert base64.b64decode(line["message"]) == b"\n\x0217"


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_a_thread(SCRIPT) as fake:
        assert main.main(["generate", "x", "--json", "--target", fake.target]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(line.get("text", "") for line in lines) == "def fib"
    assert lines[1]["finish"] == {"reason": "MAX_TOKENS"}
    assert lines[-1]["usage"]["output_tokens"] == 3
    assert lines[-1]["start"]["seed"] == 7


def test_several_outputs_are_shown_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    script = [message("a", start=True), message("x", index=1), message("b"), message("y", finish=EOS, index=1)]
    with serving_in_a_thread(script) as fake:
        assert main.main(["generate", "x", "--num-outputs", "2", "--target", fake.target]) == 0
    assert capsys.readouterr().out == "ab\n── output 1 ──\nxy\n"


def test_a_refusal_is_shown_with_its_reason_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    full = Refusal(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", [error_info("QUEUE_FULL")], (("grpc-retry-pushback-ms", "20"),)
    )
    with serving_in_a_thread([full]) as fake:
        assert main.main(["generate", "x", "--target", fake.target]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "photon-grpc: QUEUE_FULL: no room (retry in 0.02 s)\n"


def test_a_server_that_needs_a_key_says_where_to_put_it(capsys: pytest.CaptureFixture[str]) -> None:
    wants = Refusal(grpc.StatusCode.UNAUTHENTICATED, "wants a key", [error_info("MISSING_CREDENTIALS")])
    with serving_in_a_thread([wants]) as fake:
        assert main.main(["generate", "x", "--target", fake.target]) == 1
    assert "PHOTON_API_KEY" in capsys.readouterr().err


def test_no_server_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["generate", "x", "--target", f"unix:{tmp_path}/nobody"]) == 1
    assert "photon-grpc serve" in capsys.readouterr().err


def test_ctrl_c_ends_the_request_on_the_server_and_exits_130() -> None:
    with serving_in_a_thread([message("begun\n", start=True), "hang"]) as fake:
        command = [sys.executable, "-m", "photon_grpc", "generate", "x", "--target", fake.target]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            _, told = process.communicate()
        assert process.returncode == main.INTERRUPTED
        assert "Traceback" not in told
        assert wait_for(fake)


def test_a_closed_pipe_is_no_failure() -> None:
    endless = [message("line\n", start=True), *[message("line\n" * 1000)] * 200, message("", finish=EOS)]
    with serving_in_a_thread(endless) as fake:
        command = f"{sys.executable} -m photon_grpc generate x --target {fake.target} | head -n 1"
        done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.stdout == "line\n"
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def wait_for(fake: FakeServer) -> bool:
    """Wait until the servicer has returned, which the fake server's thread reports within seconds where it is idle."""
    for _ in range(600):
        if fake.ended.is_set():
            return True
        time.sleep(0.1)
    return False


def test_tools_make_a_chat_and_calls_are_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    script = [message("<tool_call>...", start=True, finish=EOS)]
    script[0].deltas[0].tool_calls.add(index=0, name="f", arguments_json='{"a": 1}', id="i")
    with serving_in_a_thread(script) as fake:
        fake.features.append(model_pb2.FEATURE_UNKNOWN_FIELDS_REFUSED)
        flags = ["--tools", str(tmp_path / "tools.json"), "--json", "--target", fake.target]
        assert main.main(["generate", "hi", *flags]) == 0
        assert main.main(["generate", "hi", *flags, "--tool-choice", "f"]) == 0
    assert [tool.name for tool in fake.requests[0].chat.tools] == ["f"]
    assert not fake.requests[0].chat.HasField("tool_choice")
    assert fake.requests[1].chat.tool_choice.name == "f"
    assert fake.requests[0].chat.messages[0].content == "hi"
    delta = json.loads(capsys.readouterr().out.splitlines()[0])
    assert delta["tool_calls"] == [{"index": 0, "name": "f", "arguments_json": '{"a": 1}', "id": "i"}]
    assert "reasoning" not in delta


def test_text_of_a_model_cannot_control_the_terminal() -> None:
    for text in (
        "👩‍💻",
        "می‌خواهم",
        "🏴\U000e0067\U000e007f",
        "\U0001fae8 e\u0301\ufe0f",
        "a\u00a0b \u3000",
        "שלום\u200f",
    ):
        assert printable(text) == text
    assert printable("a\tb\n\x1b[2Jc\x07\r\x9b é \u202e漢") == "a\tb\n␛[2Jc␇␍\ufffd é \ufffd漢"


def test_the_summary() -> None:
    stopwatch, timing = Stopwatch(), Timing(first_token_s=0.5, total_s=1.5)
    assert stopwatch.summary(None, None, "") == "0 tokens"
    assert stopwatch.summary(Usage(output_tokens=1), timing, "EOS") == "1 token · EOS"
    stopwatch.message()
    told = stopwatch.summary(Usage(output_tokens=101), timing, "EOS")
    assert told.startswith("101 tokens · first after ")
    assert told.endswith(" ms · 100 tokens/s · EOS")
