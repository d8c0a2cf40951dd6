"""`photon-grpc trace`: the picture shows what the engine has written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from photon_grpc.cli import trace_lines
from photon_grpc.cli.main import main
from photon_grpc.cli.trace_lines import read_trace
from photon_grpc.core.request import FinishReason
from photon_grpc.engine import step_trace
from photon_grpc.engine.step_trace import JsonlStepTrace
from photon_grpc.engine.trace_file import TraceFile
from photon_grpc.errors import ConfigError
from tests.engine.harness import Harness, Setting

SVG = "{http://www.w3.org/2000/svg}"
HEAD = {
    "trace": "photon-grpc",
    "version": step_trace.VERSION,
    "device": "cpu",
    "num_blocks": 10,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}


def step(number: int, start_s: float, duration_s: float = 0.01, **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"prefill": [], "decode": [], "seated": [], "ended": [], "preempted": [], "queued": 0}
    told |= {"step": number, "start_s": start_s, "duration_s": duration_s} | more
    for kind in ("prefill", "decode"):
        told[f"{kind}_tokens"] = sum(count for _, _, count in told[kind])
    return told | {"blocks": {"owned": 4, "cached": 3, "limbo": 1, "free": 2}}


def seated(name: str, request_id: str, queue_s: float = 0.0) -> dict[str, Any]:
    told = {"sequence": name, "request_id": request_id, "output": 0, "queue_s": queue_s}
    return told | {"prompt_tokens": 40, "known_tokens": 16}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def drawn(path: Path, *flags: str) -> ElementTree.Element:
    output = path.with_name("picture.html")
    assert main(["trace", str(path), "-o", str(output), *flags]) == 0
    page = output.read_text()
    return ElementTree.fromstring(page[page.index("<svg xmlns") : page.rindex("</div>")])


def titles(svg: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in svg.iter(f"{SVG}title")]


def test_every_request_of_an_engine_has_its_bar(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    harness = Harness(Setting(max_num_batched_tokens=8, num_blocks=14))
    harness.engine._trace = JsonlStepTrace(TraceFile(str(path)), harness.facts)
    for number in range(6):
        harness.add([number] * 15, 30, request_id=f"<b>{number}</b>")
    harness.run()
    harness.engine._trace.close()
    assert harness.scheduler.num_preemptions > 0
    bars = [title for title in titles(drawn(path)) if "sequence 0." in title]
    assert len(bars) == 6
    for number in range(6):
        (told,) = [bar for bar in bars if bar.startswith(f"<b>{number}</b>\n")]
        assert "15 prompt tokens" in told and "ended MAX_TOKENS" in told
    num_preempted = sum(int(found) for bar in bars for found in re.findall(r"preempted (\d+) times", bar))
    assert num_preempted == harness.scheduler.num_preemptions


def test_the_picture_alone_is_an_svg_that_styles_itself(tmp_path: Path) -> None:
    path = written(tmp_path / "steps.jsonl", HEAD, step(1, 0.0, decode=[["0.1", 40, 1]]))
    assert main(["trace", str(path), "-o", str(tmp_path / "steps.svg")]) == 0
    svg = ElementTree.parse(tmp_path / "steps.svg").getroot()
    assert svg.tag == f"{SVG}svg" and svg[0].tag == f"{SVG}style"


def test_prefill_and_decode_are_told_apart_and_lie_one_behind_the_other(tmp_path: Path) -> None:
    path = written(
        tmp_path / "steps.jsonl",
        HEAD,
        step(1, 0.0, 0.04, prefill=[["0.1", 16, 24]], seated=[seated("0.1", "first")]),
        step(2, 0.04, decode=[["0.1", 40, 1]], prefill=[["0.2", 16, 24]], seated=[seated("0.2", "second", 0.03)]),
        step(3, 0.05, decode=[["0.1", 41, 1], ["0.2", 40, 1]], ended=[["0.1", "EOS"]]),
        step(4, 0.06, decode=[["0.2", 41, 1]], ended=[["0.2", "NUMERIC_FAILURE"]]),
    )
    svg = drawn(path)
    assert [title for title in titles(svg) if title.startswith(("prefill: ", "decode: "))] == [
        "prefill: 24 tokens in step 1, 40 ms",
        "decode: 2 tokens in step 2 to 3, 20 ms",
        "prefill: 24 tokens in step 2, 10 ms",
        "decode: 2 tokens in step 3 to 4, 20 ms",
    ]
    parts = [part for part in svg.iter(f"{SVG}rect") if part.get("class") in ("prefill chunk", "decode")]
    (a, b, c, d) = [(float(part.get("x", 0)), float(part.get("width", 0)), part.get("y")) for part in parts]
    assert a[0] + a[1] == pytest.approx(b[0], abs=0.2) == pytest.approx(c[0], abs=0.4)
    assert a[1] == pytest.approx(4 * c[1], rel=0.01) and b[1] == pytest.approx(d[1], rel=0.01)
    assert a[2] == b[2] != c[2] == d[2]
    # The second one failed, and waited.
    assert len([path for path in svg.iter(f"{SVG}path") if path.get("class") == "bad"]) == 1
    assert len([path for path in svg.iter(f"{SVG}path") if path.get("class") == "waits"]) == 1


def test_idle_time_is_cut_out(tmp_path: Path) -> None:
    steps = [step(number, number * 0.01 + (3600 if number > 5 else 0), decode=[["0.1", 9, 1]]) for number in range(10)]
    trace = read_trace(written(tmp_path / "steps.jsonl", HEAD, *steps), None)
    assert trace.cuts == [(pytest.approx(0.06), pytest.approx(3600.06))]
    texts = [text.text for text in drawn(tmp_path / "steps.jsonl").iter(f"{SVG}text")]
    assert "idle 3,600 s" in texts


def test_the_last_start_counts_and_what_is_missing_is_said(tmp_path: Path) -> None:
    lines = [HEAD, step(1, 0.0), HEAD, '{"step": 1, "start_', step(2, 0.1, dropped=3), step(3, 0.2), step(4, 0.3)]
    path = written(tmp_path / "steps.jsonl", *lines)
    trace = read_trace(path, None)
    assert ([each.number for each in trace.steps], trace.num_missing) == ([2, 3, 4], 4)
    assert [each.number for each in read_trace(path, (3, 3)).steps] == [3]
    with pytest.raises(ConfigError, match="7 to 9"):
        read_trace(path, (7, 9))


@pytest.mark.parametrize("content", ["", "not a trace\n", '{"trace": "photon-grpc", "version": 99}\n[]\n'])
def test_what_is_no_trace_is_refused_in_a_sentence(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps.jsonl").write_text(content)
    assert main(["trace", str(tmp_path / "steps.jsonl")]) == 2
    assert "is not a step trace" in capsys.readouterr().err


def test_writer_and_reader_agree() -> None:
    assert trace_lines.VERSION == step_trace.VERSION
    wanted = {reason.name for reason in FinishReason} - {"UNSPECIFIED", "ABORTED"}
    assert wanted == trace_lines._WELL
