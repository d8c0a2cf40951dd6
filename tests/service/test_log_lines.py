"""Lines of the log for people and for programs."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from datetime import UTC, datetime, timedelta

import pytest

from photon_grpc.service.logs.log_lines import ForeignLines, JsonStream, formatter
from photon_grpc.service.logs.log_pipe import LogPipe, log_bare_lines, log_to_stderr


def record(text: str, *, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("x", level, "", 0, text, (), None)
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def test_a_line_of_json_has_date_zone_level_process_and_message() -> None:
    before = datetime.now(UTC)
    told = json.loads(formatter("json", "engine").format(record("hot\nday", level=logging.WARNING)))
    when = datetime.fromisoformat(told.pop("time"))
    assert when.utcoffset() == timedelta(0) and abs(when - before) < timedelta(minutes=5)
    assert told == {"level": "warning", "process": "engine", "message": "hot\nday"}
    assert json.loads(formatter("json").format(record("x")))["process"] == "supervisor"


def test_what_has_fields_tells_them_in_the_place_of_its_message() -> None:
    told = json.loads(formatter("json", "front end 0").format(record('{"event": "e"}', fields={"event": "e"})))
    assert told["event"] == "e" and "message" not in told


def test_an_exception_is_part_of_its_line() -> None:
    made = record("failed", level=logging.ERROR)
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = formatter("json", "engine").format(made)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: why")


@pytest.mark.parametrize("text", ["a" * 10_000, "é\n" * 4000, '"\\' * 5000, "x\udc80" * 3000])
def test_a_line_fits_into_what_a_pipe_takes_whole(text: str) -> None:
    line = formatter("json", "engine").format(record(text))
    assert len(line.encode()) < 4096
    assert json.loads(line)["message"].endswith(text[-100:])


def test_what_libraries_write_becomes_json_and_ours_passes() -> None:
    ours = formatter("json", "engine").format(record("x")).encode()
    lines, data = ForeignLines(), ours + b"\nE0000 chttp2: noise\n\nFatal Python error" + b"\xff"
    told = b"".join(lines.translate(data[at : at + 7]) for at in range(0, len(data), 7)) + lines.translate(b"")
    first, *others = told.splitlines()
    assert first == ours
    assert [json.loads(line)["message"] for line in others] == ["E0000 chttp2: noise", "Fatal Python error\ufffd"]
    assert all(json.loads(line).keys() == {"time", "level", "process", "message"} for line in others)


def test_what_never_ends_a_line_is_not_kept_for_ever() -> None:
    lines = ForeignLines()
    told = b"".join(lines.translate(b"x" * 1000) for _ in range(100))
    assert 10 < told.count(b"\n") < 100


def test_a_stream_of_prints_becomes_json() -> None:
    out = io.StringIO()
    print("photon-grpc: warning: x", "10 %\r50 %\r100 %", sep="\n", file=JsonStream(out))
    assert [json.loads(line)["message"] for line in out.getvalue().splitlines()] == ["photon-grpc: warning: x", "100 %"]


def test_every_line_of_a_process_is_json_requests_and_libraries_included() -> None:
    reader, writer = os.pipe()
    pipe = LogPipe(writer, "json")
    log_to_stderr("error", "front end 0", log_format="json", fd=pipe.fd)
    log_bare_lines("bare", log_format="json", fd=pipe.fd)
    logging.getLogger("bare").info("%s", '{"event": "request"}', extra={"fields": {"event": "request"}})
    logging.getLogger("other").info("below the level")
    os.write(pipe.fd, b"native\n")
    pipe.close()
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:
        told = [json.loads(line) for line in lines]
    assert [(line.get("event"), line.get("message")) for line in told] == [("request", None), (None, "native")]
    assert all("time" in line for line in told)
