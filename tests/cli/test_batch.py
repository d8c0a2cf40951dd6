"""`batch` against the real wire: every line is answered once, whatever stops it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from photon_grpc.cli import main
from photon_grpc.client import many
from photon_grpc.client.message_type import find_message_type
from photon_grpc.v1 import inference_pb2 as pb
from tests.client.described import NAME, descriptor_set
from tests.client.fake_server import FakeServer, Refusal, error_info, message, serving_in_a_thread, typed

HI = [message("hi", start=True, finish=pb.FINISH_REASON_EOS)]
FULL = Refusal(
    grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [error_info("QUEUE_FULL")], (("grpc-retry-pushback-ms", "10"),)
)
BAD = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too long", [error_info("PROMPT_TOO_LONG")])


def answers(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def run(fake: FakeServer, source: str, out: Path, *flags: str) -> int:
    return main.main(["batch", source, str(out), "--target", fake.target, *flags])


def test_every_line_is_answered_with_its_own_options(tmp_path: Path, out: Path) -> None:
    lines = [
        "plain",
        {"prompt": "x", "id": "first", "max_tokens": 3},
        {"prompt": [1, 2], "id": 7},
        {"messages": [{"role": "user", "content": "hällo"}], "temperature": 0.5},
    ]
    with serving_in_a_thread(HI) as fake:
        assert run(fake, write(tmp_path / "in.jsonl", *lines), out, "--max-tokens", "9", "--concurrency", "1") == 0
    asked = fake.requests
    assert [request.WhichOneof("input") for request in asked] == ["text", "text", "token_ids", "chat"]
    assert [request.stop.max_tokens for request in asked] == [9, 3, 9, 9]
    assert asked[3].sampling.temperature == 0.5
    told = answers(out)
    assert [(record["line"], record.get("id")) for record in told] == [(1, None), (2, "first"), (3, 7), (4, None)]
    assert all(record["outputs"] == [{"text": "hi", "finish": "EOS"}] for record in told)


def test_the_constraint_of_a_line_replaces_that_of_the_flags(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path / "in.jsonl", "plain", {"prompt": "x", "choices": ["a"]}, {"prompt": "x", "top_k": 2})
    with serving_in_a_thread(HI) as fake:
        assert run(fake, source, out, "--regex", "[0-9]", "--concurrency", "1") == 0
    asked = [request.structured_output.WhichOneof("constraint") for request in fake.requests]
    assert asked == ["regex", "choices", "regex"]


def test_overwritten_answers_are_requested_again(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = write(tmp_path / "in.jsonl", "x", "y"), write(tmp_path / "other.jsonl", "z")
    with serving_in_a_thread(HI) as fake:
        assert run(fake, source, out) == 0
        assert run(fake, other, out) == 2
        assert "--overwrite" in capsys.readouterr().err
        assert run(fake, other, out, "--overwrite") == 0
        assert run(fake, other, out) == 0
    assert [request.text for request in fake.requests[2:]] == ["z"]
    (only,) = answers(out)
    assert only["line"] == 1


def test_messages_of_typed_output_are_base64(tmp_path: Path, out: Path) -> None:
    (tmp_path / "set").write_bytes(descriptor_set())
    whole = message('{"number":"17"}', finish=pb.FINISH_REASON_EOS)
    whole.deltas[0].message.CopyFrom(typed(find_message_type(descriptor_set(), NAME)(number="17")))
    with serving_in_a_thread([whole]) as fake:
        assert run(fake, write(tmp_path / "in.jsonl", "x"), out, "--protobuf", f"{tmp_path}/set", NAME) == 0
    assert answers(out)[0]["outputs"] == [{"text": '{"number":"17"}', "finish": "EOS", "message": "CgIxNw=="}]


def test_a_failed_line_is_reported_and_the_others_are_answered(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "long"}\n{no json\n\n{"prompt": "x", "max_token": 1}\n{"id": 1}\n"good"\n')
    with serving_in_a_thread([BAD], HI) as fake:
        assert run(fake, str(source), out, "--concurrency", "1") == 1
    told = {record["line"]: record for record in answers(out)}
    assert [told[line]["error"]["reason"] for line in (1, 2, 4, 5)] == ["PROMPT_TOO_LONG", *["INVALID_REQUEST"] * 3]  # type: ignore[index]
    assert told[4]["error"]["field"] == "max_token"  # type: ignore[index]
    assert told[6]["outputs"] == [{"text": "hi", "finish": "EOS"}]


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": 5}',
        b'{"prompt": NaN}',
        b'{"prompt": ["a"]}',
        b'"\\ud800"',
        b'{"messages": "hi"}',
        b'{"messages": [5]}',
        b'{"prompt": "x", "logit_bias": {"five": 1}}',
        b'{"prompt": "x", "max_tokens": "many"}',
        b'"\xff"',
        b"[" * 100_000,
    ],
)
def test_an_invalid_line_does_not_affect_the_others(line: bytes, tmp_path: Path, out: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(line + b'\n"good"\n')
    with serving_in_a_thread(HI) as fake:
        assert run(fake, str(source), out) == 1
        assert {record["line"]: "error" in record for record in answers(out)} == {1: True, 2: False}
        assert run(fake, str(source), out) == 1
    assert len(fake.requests) == 1


def test_only_a_line_feed_ends_a_line(tmp_path: Path, out: Path) -> None:
    text = "a\u2028b\u0085c\x0bd"
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in (text, {"prompt": "x", "id": text}))
    )
    with serving_in_a_thread([message(text, start=True, finish=pb.FINISH_REASON_EOS)]) as fake:
        assert run(fake, str(source), out, "--concurrency", "1") == 0
        assert [request.text for request in fake.requests] == [text, "x"]
        whole = out.read_bytes()
        assert run(fake, str(source), out) == 0
        assert out.read_bytes() == whole and len(fake.requests) == 2


def test_a_lone_surrogate_in_an_id_and_a_bias_by_name_are_accepted(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x", "id": "\\ud800", "logit_bias": {"5": 1.5}, "labels": {"a": "b"}}\n')
    with serving_in_a_thread(HI) as fake:
        assert run(fake, str(source), out, "--label", "run=1") == 0
    assert dict(fake.requests[0].labels) == {"a": "b"}
    assert dict(fake.requests[0].sampling.logit_bias) == {5: 1.5}
    assert json.loads(out.read_bytes())["id"] == "\ud800"


def test_a_full_server_is_asked_until_it_has_room(tmp_path: Path, out: Path) -> None:
    with serving_in_a_thread(*[[FULL]] * 12, HI) as fake:
        assert run(fake, write(tmp_path / "in.jsonl", "a"), out) == 0
    assert len(fake.requests) == 13
    assert len(answers(out)) == 1


def test_a_second_run_requests_only_missing_answers(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", "a", "b", "c")
    with serving_in_a_thread(HI) as fake:
        assert run(fake, source, out, "--concurrency", "1") == 0
        whole = out.read_text()
        # As if it had been killed while it wrote its second answer.
        out.write_bytes(whole[: whole.index("\n") + 20].encode() + "ä".encode()[:1])
        fake.requests.clear()
        assert run(fake, source, out, "--concurrency", "1") == 0
        assert [request.text for request in fake.requests] == ["b", "c"]
        assert out.read_text() == whole
        assert "already has 1 of 3 answers" in capsys.readouterr().err
        fake.requests.clear()
        assert run(fake, source, out) == 0
        assert fake.requests == [] and out.read_text() == whole


def test_answers_of_other_requests_are_not_mixed_with_these(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_in_a_thread(HI) as fake:
        assert run(fake, write(tmp_path / "in.jsonl", "a"), out) == 0
        before = out.read_text()
        assert run(fake, write(tmp_path / "in.jsonl", "other"), out) == 2
        assert "answers another request at line 1" in capsys.readouterr().err
        assert out.read_text() == before


@pytest.mark.parametrize("held", ['"a"\n', "notes without a line end", '{"line": [], "digest": ""}\n'])
def test_a_file_that_is_not_an_output_is_kept(
    held: str, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out.write_text(held)
    with serving_in_a_thread(HI) as fake:
        assert run(fake, write(tmp_path / "in.jsonl", "a"), out) == 2
    assert "not an output of batch; name another file, or overwrite it with --overwrite" in capsys.readouterr().err
    assert out.read_text() == held and fake.requests == []


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "fifo"])
def test_an_output_that_cannot_be_read_again_is_refused(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with serving_in_a_thread(HI) as fake:
        # An absolute path stays as it is; /dev/full would give zeros without end.
        assert run(fake, write(tmp_path / "in.jsonl", "a"), tmp_path / path) == 2
    assert "is not a regular file" in capsys.readouterr().err and fake.requests == []


def test_a_full_disk_is_reported_with_the_name_of_the_file(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with serving_in_a_thread(HI) as fake:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            assert run(fake, write(tmp_path / "in.jsonl", "a"), out) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"File too large: '{out}'" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_the_input_is_refused_as_the_output(
    link: Callable[[str, Path], None] | None,
    flags: tuple[str, ...],
    tmp_path: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write(tmp_path / "in.jsonl", "a", "b")
    if link:
        link(source, out)
    with serving_in_a_thread(HI) as fake:
        assert run(fake, source, out if link else Path(source), *flags) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "is the input" in told and "name another file" in told
    assert Path(source).read_text() == '"a"\n"b"\n' and fake.requests == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-tokens", "9"),
        ("--temperature", "0.5"),
        ("--seed", "1"),
        ("--model", "other"),
        ("--regex", "[0-9]"),
        ("--json-schema", "SCHEMA"),
        ("--protobuf", "SET", NAME),
        ("--logit-bias", "5=1.5"),
        ("--num-outputs", "2"),
        ("--logprobs", "1"),
    ],
    ids=lambda flags: flags[0],
)
def test_answers_made_with_other_flags_are_not_reused(
    flags: tuple[str, ...], tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set").write_bytes(descriptor_set())
    (tmp_path / "schema").write_text('{"type": "integer"}')
    files = {"SET": str(tmp_path / "set"), "SCHEMA": str(tmp_path / "schema")}
    source, given = write(tmp_path / "in.jsonl", "a"), [files.get(flag, flag) for flag in flags]
    with serving_in_a_thread(HI) as fake:
        assert run(fake, source, out, "--max-tokens", "3") == 0
        before = out.read_text()
        assert run(fake, source, out, "--max-tokens", "3", *given) == 2
        assert "other flags; name another file, or overwrite it with --overwrite" in capsys.readouterr().err
    assert out.read_text() == before and len(fake.requests) == 1


def test_a_second_run_may_use_other_scheduling_flags(tmp_path: Path, out: Path) -> None:
    source, flags = write(tmp_path / "in.jsonl", "a"), ["--logit-bias", "5=1", "--logit-bias", "6=2", "--seed", "1"]
    with serving_in_a_thread(HI) as fake:
        assert run(fake, source, out, *flags, "--timeout", "5") == 0
        again = ["--seed", "1", "--logit-bias", "6=2", "--logit-bias", "5=1", "--timeout", "60", "--priority", "1"]
        again += ["--label", "run=2"]
        assert run(fake, source, out, *again, "--concurrency", "1") == 0
    assert len(fake.requests) == 1


#: A shell's background jobs ignore SIGINT, and so would what they start. Set after the start: code between fork and
#: exec can wait for ever for a lock that a thread of gRPC held.
TAKES_SIGINT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
from photon_grpc.cli import main
sys.exit(main.main(sys.argv[1:]))
"""


def test_ctrl_c_keeps_what_was_answered(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path / "in.jsonl", "a", "b")
    with serving_in_a_thread(HI, [message("hi", start=True), "hang"]) as fake:
        command = [sys.executable, "-c", TAKES_SIGINT, "batch", source, str(out), "--target", fake.target]
        with subprocess.Popen([*command, "--concurrency", "1"], stderr=subprocess.PIPE, text=True) as process:
            end_s = time.monotonic() + 240
            while not (out.exists() and out.read_text().endswith("\n") and len(fake.requests) == 2):
                assert time.monotonic() < end_s
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate()
    assert (process.returncode, len(answers(out))) == (main.INTERRUPTED, 1)
    assert "Traceback" not in told


def test_a_missing_server_is_reported_once_and_at_once(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(many, "PERSISTENT", replace(many.PERSISTENT, patience_s=0.5))
    source, target = write(tmp_path / "in.jsonl", "a", "b"), f"unix:{tmp_path}/no"
    assert main.main(["batch", source, str(out), "--target", target]) == 1
    assert out.read_text() == ""
    first, *later = capsys.readouterr().err.splitlines()
    assert first.startswith(f"no answer from {target}") and first.endswith("retrying for 60 s")
    assert not any("retrying for" in line for line in later)
    assert any("Is a server running?" in line for line in later)
