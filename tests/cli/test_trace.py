"""`photon-grpc trace`: the file follows the rules of trace events, and says what the engine has written."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from photon_grpc.cli import trace_lines
from photon_grpc.cli.main import main
from photon_grpc.engine import step_trace
from photon_grpc.engine.step_trace import JsonlStepTrace
from photon_grpc.engine.trace_file import TraceFile
from tests.engine.harness import Harness, Setting

Event = dict[str, Any]
ENGINE, SEQUENCES = 1, 2
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


def events_of(path: Path, *flags: str) -> list[Event]:
    """Return the events that the verb writes, checked against the rules of the format."""
    output = path.with_name("events.json")
    assert main(["trace", str(path), "-o", str(output), *flags]) == 0
    document = json.loads(output.read_text())
    assert document.keys() == {"displayTimeUnit", "metadata", "traceEvents"}
    events: list[Event] = document["traceEvents"]
    for event in events:
        assert event["ph"] in "XiCM" and event["name"], event
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "pid", "tid")), event
        check_phase(event)
    tracks = {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xi"}
    names = Counter((event["pid"], event["tid"]) for event in events if event["name"] == "thread_name")
    assert set(names.values()) == {1} and names.keys() == tracks
    processes = Counter(event["pid"] for event in events if event["name"] == "process_name")
    assert processes == {ENGINE: 1, SEQUENCES: 1}
    check_nesting([event for event in events if event["ph"] == "X"])
    return events


def check_phase(event: Event) -> None:
    match event["ph"]:
        case "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0, event
        case "i":
            assert event["s"] == "t", event
        case "C":
            assert event["args"] and all(isinstance(each, int) for each in event["args"].values()), event
        case "M":
            assert event["args"].get("name") or isinstance(event["args"]["sort_index"], int), event


def check_nesting(events: list[Event]) -> None:
    """Of one track, an event ends before the next begins, or holds it whole."""
    tracks = defaultdict(list)
    for event in events:
        tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for spans in tracks.values():
        around: list[int] = []
        for start, length in sorted(spans):
            while around and around[-1] <= start:
                around.pop()
            assert not around or start - length <= around[-1], (start, length, around)
            around.append(start - length)


def check_counts(events: list[Event], path: Path) -> None:
    """Tokens, steps, ends and counters are those of the trace's lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    steps = [line for line in lines if "step" in line]
    bars = [event for event in events if (event["ph"], event["pid"]) == ("X", ENGINE)]
    assert [bar["args"]["step"] for bar in bars] == [line["step"] for line in steps]
    for kind in ("prefill", "decode"):
        tokens = [line[f"{kind}_tokens"] for line in steps]
        assert [bar["args"][f"{kind}_tokens"] for bar in bars] == tokens
        assert sum(event["args"][kind] for event in counters(events, "tokens")) == sum(tokens)
        parts = [event for event in events if (event["name"], event["pid"]) == (kind, SEQUENCES)]
        assert sum(part["args"]["tokens"] for part in parts) == sum(tokens)
    assert [event["args"] for event in counters(events, "KV blocks")] == [line["blocks"] for line in lines]
    assert [event["args"]["queued"] for event in counters(events, "requests")] == [line["queued"] for line in lines]
    seated = {each["sequence"] for line in steps for each in line["seated"]}
    ended = Counter(f"ended: {why}" for line in lines for name, why in line["ended"] if name in seated)
    assert Counter(event["name"] for event in events if event["name"].startswith("ended: ")) == ended
    assert number_of(events, "preempted") == sum(len(line["preempted"]) for line in lines)


def counters(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if (event["ph"], event["name"]) == ("C", name)]


def number_of(events: list[Event], name: str) -> int:
    return sum(event["name"] == name for event in events)


def tracks_of(events: list[Event]) -> dict[str, list[Event]]:
    """Titles of sequences, and what lies on their tracks, in the order of time."""
    titles = {
        event["tid"]: event["args"]["name"]
        for event in events
        if (event["name"], event["pid"]) == ("thread_name", SEQUENCES)
    }
    tracks: dict[str, list[Event]] = {title: [] for title in titles.values()}
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        if event["pid"] == SEQUENCES and event["ph"] in "Xi":
            tracks[titles[event["tid"]]].append(event)
    return tracks


@pytest.mark.parametrize("depth", [0, 2])
def test_every_request_of_an_engine_has_its_track(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "steps.jsonl"
    harness = Harness(Setting(depth=depth, max_num_batched_tokens=8, num_blocks=14))
    harness.engine._traces.append(JsonlStepTrace(TraceFile(str(path)), harness.facts))
    for number in range(6):
        harness.add([number] * 15, 30, request_id=f'"{number}"\n')
    harness.run()
    harness.engine._traces[0].close()
    events = events_of(path)
    check_counts(events, path)
    assert number_of(events, "preempted") == harness.scheduler.num_preemptions > 0
    tracks = tracks_of(events)
    assert set(tracks) == {f'"{number}"\n' for number in range(6)}
    for track in tracks.values():
        assert number_of(track, "ended: MAX_TOKENS") == 1
        assert number_of(track, "seated again") == number_of(track, "preempted")
        assert (track[0]["name"], track[0]["args"]["prompt_tokens"]) == ("queued", 15)
    running = [event["args"]["running"] for event in counters(events, "requests")]
    assert running[-1] == 0 < max(running) <= harness.facts.max_num_seqs


def test_prefill_and_decode_are_separate_and_do_not_overlap(tmp_path: Path) -> None:
    """The fourth step is launched before the third has been read."""
    path = written(
        tmp_path / "steps.jsonl",
        HEAD,
        step(1, 0.0, 0.04, prefill=[["0.1", 16, 24]], seated=[seated("0.1", "first")]),
        step(2, 0.04, decode=[["0.1", 40, 1]], prefill=[["0.2", 16, 24]], seated=[seated("0.2", "second", 0.03)]),
        step(3, 0.05, decode=[["0.1", 41, 1], ["0.2", 40, 1]], ended=[["0.1", "EOS"]]),
        step(4, 0.055, 0.015, decode=[["0.2", 41, 1]], ended=[["0.2", "NUMERIC_FAILURE"]]),
    )
    events = events_of(path)
    check_counts(events, path)
    shown = {
        title: [(event["name"], event["ts"], event.get("dur"), event.get("args", {}).get("tokens")) for event in track]
        for title, track in tracks_of(events).items()
    }
    assert shown == {
        "first": [
            ("prefill", 0, 40_000, 24),
            ("queued", 0, 0, None),
            ("decode", 40_000, 20_000, 2),
            ("ended: EOS", 60_000, None, None),
        ],
        "second": [
            ("queued", 10_000, 30_000, None),
            ("prefill", 40_000, 10_000, 24),
            ("decode", 50_000, 20_000, 2),
            ("ended: NUMERIC_FAILURE", 70_000, None, None),
        ],
    }
    bars = [event for event in events if (event["ph"], event["pid"]) == ("X", ENGINE)]
    assert [bar["name"] for bar in bars] == ["prefill", "prefill and decode", "decode", "decode"]
    assert (bars[3]["ts"], bars[3]["dur"]) == (60_000, 10_000)
    assert (bars[3]["args"]["launched_us"], bars[3]["args"]["took_us"]) == (55_000, 15_000)


def test_token_counters_are_zero_between_steps(tmp_path: Path) -> None:
    steps = [step(1, 0.0, decode=[["0.1", 9, 1]]), step(2, 3600.0, decode=[["0.1", 10, 1]])]
    events = events_of(written(tmp_path / "steps.jsonl", HEAD, *steps))
    shown = [(event["ts"], event["args"]["decode"]) for event in counters(events, "tokens")]
    assert shown == [(0, 1), (10_000, 0), (3_600_000_000, 1), (3_600_010_000, 0)]


def test_a_handle_that_is_given_again_has_a_track_of_its_own(tmp_path: Path) -> None:
    path = written(
        tmp_path / "steps.jsonl",
        HEAD,
        step(1, 0.0, prefill=[["0.0", 0, 4]], seated=[seated("0.0", "before")], ended=[["0.0", "CANCELLED"]]),
        step(2, 1.0, prefill=[["0.0", 0, 5]], seated=[seated("0.0", "after")], ended=[["0.0", "EOS"]]),
    )
    tracks = tracks_of(events_of(path))
    assert [[event["name"] for event in track][-1] for track in tracks.values()] == ["ended: CANCELLED", "ended: EOS"]


def test_only_the_last_start_counts_and_missing_lines_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"decode": [["0.1", 40, 1]]}
    lines = [HEAD, step(1, 0.0), HEAD, '{"step": 1, "start_', step(2, 0.1, dropped=3), step(3, 0.2, **rows), step(4, 3)]
    path = written(tmp_path / "steps.jsonl", *lines)
    bars = [event["args"]["step"] for event in events_of(path) if (event["ph"], event["pid"]) == ("X", ENGINE)]
    assert bars == [2, 3, 4] and "(steps: 3, sequences: 1, missing lines: 4)" in capsys.readouterr().out
    assert "0.1" in tracks_of(events_of(path, "--steps", "3:3"))
    assert main(["trace", str(path), "--steps", "7:9"]) == 2
    assert "no steps from 7 to 9" in capsys.readouterr().err
    assert not path.with_suffix(".json").exists()


@pytest.mark.parametrize("broken", ["[" * 50_000, "\0", step(2, 0.1) | {"step": None}])
def test_a_broken_line_is_counted_as_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: Any) -> None:
    path = written(tmp_path / "steps.jsonl", HEAD, step(1, 0.0), broken)
    assert main(["trace", str(path)]) == 0
    assert "(steps: 1, sequences: 0, missing lines: 1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"start_s": "soon"}, "'start_s' cannot be 'soon'"),
        ({"duration_s": float("inf")}, "'duration_s' cannot be inf"),
        ({"start_s": 1e308}, "'start_s' cannot be 1e+308"),
        ({"prefill_tokens": None}, "'prefill_tokens' cannot be None"),
        ({"decode": [["0.1", 9]]}, "'decode' cannot be [['0.1', 9]]"),
        ({"decode": {"0.1": 9}}, "'decode' cannot be {'0.1': 9}"),
        ({"seated": [{"sequence": "0.1"}]}, "'seated' cannot be [{'sequence': '0.1'}]"),
        ({"ended": ["0.1"]}, "'ended' cannot be ['0.1']"),
        ({"preempted": [[]]}, "'preempted' cannot be [[]]"),
        ({"blocks": {"owned": 4}}, "'blocks' cannot be {'owned': 4}"),
        ({"blocks": 7}, "'blocks' cannot be 7"),
        ({"queued": -1}, "'queued' cannot be -1"),
        ({"dropped": "some"}, "'dropped' cannot be 'some'"),
    ],
)
def test_a_wrong_value_is_an_error_with_the_number_of_its_line(
    tmp_path: Path, values: dict[str, Any], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "steps.jsonl", HEAD, HEAD, step(1, 0.0), step(2, 0.1) | values)
    assert main(["trace", str(path)]) == 2
    assert f"{path}, line 4: {shown}; was the step trace edited?\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_only_its_owner_may_read_the_events(tmp_path: Path) -> None:
    path = written(tmp_path / "steps.jsonl", HEAD, step(1, 0.0))
    assert main(["trace", str(path)]) == 0
    assert (tmp_path / "steps.jsonl.json").stat().st_mode & 0o777 == 0o600


def test_the_trace_itself_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "steps.json", HEAD, step(1, 0.0, decode=[["0.1", 9, 1]]))
    before = path.read_bytes()
    assert main(["trace", str(path), "-o", str(path)]) == 2
    assert "name another file" in capsys.readouterr().err and path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "not a trace\n", '{"trace": "photon-grpc", "version": 99}\n[]\n'])
def test_a_file_that_is_not_a_trace_is_refused(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps.jsonl").write_text(content)
    assert main(["trace", str(tmp_path / "steps.jsonl")]) == 2
    assert "is not a step trace" in capsys.readouterr().err


def test_writer_and_reader_agree() -> None:
    assert trace_lines.VERSION == step_trace.VERSION
