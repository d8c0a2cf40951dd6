"""The trace of the steps: what it says is what the engine did, and no disk holds the engine up."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.core.frames import Abort
from photon_grpc.engine import trace_file
from photon_grpc.engine.step_trace import VERSION, JsonlStepTrace
from photon_grpc.engine.trace_file import TraceFile, check_trace_file
from photon_grpc.errors import ConfigError
from tests.engine.harness import Harness, Setting

Line = dict[str, Any]


def traced(path: Path, setting: Setting) -> Harness:
    harness = Harness(setting)
    harness.engine._traces.append(JsonlStepTrace(TraceFile(str(path)), harness.facts))
    return harness


def lines_of(path: Path) -> tuple[Line, list[Line]]:
    head, *steps = map(json.loads, path.read_text().splitlines())
    return head, steps


def test_a_request_can_be_followed_from_admission_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    harness = traced(path, Setting(max_num_batched_tokens=6, num_blocks=16))
    harness.add(list(range(1, 11)), 3, request_id="long")
    harness.add([50, 51], 2, request_id="short")
    harness.run()
    harness.engine._traces[0].close()
    head, steps = lines_of(path)
    assert (head["trace"], head["version"], head["num_blocks"], head["block_size"]) == ("photon-grpc", VERSION, 16, 4)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert [step["prefill"] for step in steps[:2]] == [[["0.0", 0, 6]], [["0.0", 6, 4], ["0.1", 0, 2]]]
    assert [step["decode"] for step in steps[2:4]] == [[["0.0", 10, 1], ["0.1", 2, 1]], [["0.0", 11, 1]]]
    seated = [each for step in steps for each in step["seated"]]
    assert [(each["sequence"], each["request_id"], each["prompt_tokens"]) for each in seated] == [
        ("0.0", "long", 10),
        ("0.1", "short", 2),
    ]
    assert [step["ended"] for step in steps] == [[], [], [["0.1", "MAX_TOKENS"]], [["0.0", "MAX_TOKENS"]]]
    assert [step["output_ids"] for step in steps] == [0, 2, 2, 1]
    assert all(sum(step["blocks"].values()) == 16 for step in steps)
    assert steps[0]["queued"] == 1 and steps[-1]["blocks"]["owned"] == 0


@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    depth=st.integers(0, 2),
    budget=st.integers(1, 32),
    num_blocks=st.integers(14, 40),
    drafts=st.sampled_from([(0,), (2, 0)]),
)
def test_rows_add_up_to_what_was_computed(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[int],
    depth: int,
    budget: int,
    num_blocks: int,
    drafts: tuple[int, ...],
) -> None:
    """Check that positions are in order from each admission on, and that every sequence ends once."""
    path = tmp_path_factory.mktemp("trace") / "steps.jsonl"
    setting = Setting(depth=depth, max_num_batched_tokens=budget, num_blocks=num_blocks, drafts=drafts)
    harness = traced(path, setting)
    for number, length in enumerate(prompts):
        harness.add([10 * number + 1] * length, 6)
    harness.run()
    harness.engine._traces[0].close()
    _, steps = lines_of(path)
    nexts: dict[str, int] = {}
    ended = Counter(name for step in steps for name, _ in step["ended"])
    lost: defaultdict[str, int] = defaultdict(int)
    for step in steps:
        for each in step["seated"]:
            nexts[each["sequence"]] = each["known_tokens"]
        for name, first, num_tokens in (*step["prefill"], *step["decode"]):
            # Drafts that were not kept are computed again.
            assert first <= nexts[name] if drafts != (0,) else first == nexts[name]
            nexts[name] = first + num_tokens
        assert sum(n for _, _, n in step["prefill"]) == step["prefill_tokens"]
        assert step["prefill_tokens"] + step["decode_tokens"] <= budget
        assert len({name for name, _, _ in (*step["prefill"], *step["decode"])}) == len(step["prefill"]) + len(
            step["decode"]
        )
        for name in step["preempted"]:
            lost[name] += 1
    assert set(ended.values()) == {1} and len(ended) == len(prompts)
    assert sum(lost.values()) == harness.scheduler.num_preemptions


def test_an_end_while_nothing_else_runs_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    harness = traced(path, Setting())
    harness.add([1, 2], 50)
    harness.engine.step()
    harness.abort(0)
    harness.run()
    harness.engine._traces[0].close()
    step, rest = lines_of(path)[1]
    assert (step["step"], rest["after_step"], rest["ended"]) == (1, 1, [["0.0", "CANCELLED"]])
    assert rest["blocks"]["owned"] == 0


def test_an_abort_is_written_with_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    harness = traced(path, Setting())
    harness.add([1, 2], 50)
    harness.add([3, 4], 50)
    harness.add([5, 6], 3)
    harness.engine.step()
    harness.post.put(Abort((0,)))
    harness.post.put(Abort((1,), by_stop_string=True))
    harness.run()
    harness.engine._traces[0].close()
    _, lines = lines_of(path)
    assert all("step" in line for line in lines)
    ended = [each for line in lines for each in line["ended"]]
    assert ended == [["0.0", "CANCELLED"], ["0.1", "STOP_STRING"], ["0.2", "MAX_TOKENS"]]


def numbered(number: int) -> Line:
    return {"number": number, "filling": "x" * 80}


def test_at_most_two_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    file = TraceFile(str(path), max_bytes=1000)
    file.begin({"head": True})
    for number in range(100):
        file.put((numbered, number))
    file.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["steps.jsonl", "steps.jsonl.1"]
    for each in tmp_path.iterdir():
        head, _ = lines_of(each)
        assert head == {"head": True} and each.stat().st_size <= 1000
    assert lines_of(path)[1][-1]["number"] == 99


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes of a line is taken back, and what was left out is counted in the next one."""
    path = tmp_path / "steps.jsonl"
    write, is_full = os.write, threading.Event()

    def half(file: int, data: bytes) -> int:
        return write(file, data[: len(data) // 2] if is_full.is_set() else data)

    monkeypatch.setattr(trace_file.os, "write", half)
    file = TraceFile(str(path))
    file.begin({"head": True})
    file.put((numbered, 0))
    file.put((lambda: is_full.set() or numbered(1),))
    file.put((numbered, 2))
    file.put((lambda: is_full.clear() or numbered(3),))
    file.put((numbered, 4))
    file.close()
    _, lines = lines_of(path)
    assert [(line["number"], line.get("dropped", 0)) for line in lines] == [(0, 0), (3, 2), (4, 0)]


def test_a_hanging_disk_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_MAX_WAITING", 4)
    goes_on = threading.Event()
    file = TraceFile(str(tmp_path / "steps.jsonl"))
    file.begin({})
    file.put((lambda: goes_on.wait(120) and {},))
    for number in range(50):
        file.put((numbered, number))
    goes_on.set()
    file.close()
    _, lines = lines_of(tmp_path / "steps.jsonl")
    assert sum(line.get("dropped", 0) for line in lines) == 51 - len(lines) >= 40


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "steps.jsonl"))
    file.begin({})
    file.put((numbered, 0))
    file.close()
    assert (tmp_path / "steps.jsonl").stat().st_mode & 0o777 == 0o600


def test_the_check_keeps_an_existing_file_and_leaves_no_new_one(tmp_path: Path) -> None:
    (tmp_path / "before").write_text("a line\n")
    for name in ("before", "new"):
        check_trace_file(str(tmp_path / name))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("before", "a line\n")]


@pytest.mark.parametrize(
    ("path", "problem"), [("no/such/dir", "No such file"), (".", "directory"), ("/dev/null", "regular")]
)
def test_an_unwritable_path_is_refused_at_the_start(tmp_path: Path, path: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_trace_file(str(tmp_path / path))


@pytest.mark.parametrize("is_read", [False, True])
def test_a_fifo_is_refused_at_once(tmp_path: Path, is_read: bool) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    with pytest.raises(ConfigError, match="regular" if is_read else "No such device"):
        check_trace_file(str(path))
    if reader is not None:
        os.close(reader)
