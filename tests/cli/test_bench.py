"""`bench` against a fake server over gRPC: the requests it sends, the figures, the report, in real processes."""

from __future__ import annotations

import json
import signal
import statistics
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.cli import bench as bench_module
from photon_grpc.cli import main
from photon_grpc.cli.bench import BenchOptions, plan
from photon_grpc.cli.load.load import Percentiles, RequestResult, Session, Turn, Workload, run_load, summarize
from photon_grpc.cli.load.report import bars
from photon_grpc.client import Model
from photon_grpc.errors import InternalFailure, PromptTooLong
from photon_grpc.v1 import inference_pb2 as pb
from tests.client.fake_server import FakeServer, Refusal, error_info, message, serving, serving_in_a_thread

SCRIPT = [message("a", start=True), message("b"), message("c", finish=pb.FINISH_REASON_MAX_TOKENS)]
MODEL = Model("m", (), "READY", 1024, 1000, (), ())


def test_it_sends_what_was_asked_for_from_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--concurrency 4 --requests 9 --input-tokens 20 --output-tokens 6 --processes 2 --no-text --logprobs 5"
    with serving_in_a_thread(SCRIPT) as fake:
        assert main.main(["bench", "--target", fake.target, *flags.split()]) == 0
    assert len(fake.requests) == 9
    prompts = {tuple(request.token_ids.ids) for request in fake.requests}
    assert len(prompts) == 9
    assert all(len(prompt) == 20 and max(prompt) < 512 for prompt in prompts)
    for request in fake.requests:
        assert (request.stop.max_tokens, request.stop.ignore_eos, request.sampling.temperature) == (6, True, 0)
        assert (request.output.text, request.output.token_ids) == (False, True)
        assert request.output.logprobs == 5
    assert len({request.cache.salt for request in fake.requests}) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(
        f"demo at {fake.target} · 9 requests, 4 at a time · 20 ids in, 6 tokens out with logprobs 5 · 2 client"
    )
    assert "9 completed in" in captured.out
    assert "to the first token" in captured.out
    assert captured.err == ""


def test_a_single_message_has_no_gap_between_messages(capsys: pytest.CaptureFixture[str]) -> None:
    whole = [message("abc", start=True, finish=pb.FINISH_REASON_MAX_TOKENS)]
    with serving_in_a_thread(whole) as fake:
        assert main.main(["bench", "--target", fake.target, "--requests", "2", "--output-tokens", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:28].rstrip(): line[28:].split() for line in lines if line.startswith(("between", "whole"))}
    assert rows["between messages"] == ["–"] * 3
    assert all(float(shown) > 0 for shown in rows["whole request"][:3])
    assert "█" in rows["whole request"][-1]


@given(st.lists(st.floats(0, 1e3), max_size=300))
def test_bars_show_the_distribution(values: list[float]) -> None:
    shown, end = bars(values), Percentiles.of(values).p99
    assert len(shown) == (24 if end else 0)
    for column, bar in enumerate(shown):
        low, high = end * column / 24, end * (column + 1) / 24
        inside = [value for value in values if low * 1.000001 < value < high * 0.999999]
        assert bar != " " or not inside
    assert not shown or "█" in shown


def test_a_plot_is_drawn_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "latency.svg"
    with serving_in_a_thread(SCRIPT) as fake:
        flags = ["--requests", "4", "--output-tokens", "3", "--target", fake.target]
        assert main.main(["bench", *flags, "--plot", str(path)]) == 0
        assert path.read_text().count("<path") > 4
        for name, told in (("x.txt", "one of .svg"), ("none/x.svg", "no directory")):
            assert main.main(["bench", *flags, "--plot", str(tmp_path / name)]) == 2
            assert told in capsys.readouterr().err


def test_a_second_run_shares_no_prefix_with_the_first() -> None:
    with serving_in_a_thread(SCRIPT) as fake:
        for _ in range(2):
            assert main.main(["bench", "--target", fake.target, "--requests", "1"]) == 0
    first, second = fake.requests
    assert first.token_ids == second.token_ids
    assert not first.output.HasField("logprobs")
    assert first.cache.salt != second.cache.salt


def test_drafts_are_bounded_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    drafted = pb.StreamGenerateResponse.FromString(SCRIPT[-1].SerializeToString())
    drafted.usage.draft_tokens, drafted.usage.accepted_draft_tokens = 8, 6
    with serving_in_a_thread([*SCRIPT[:-1], drafted]) as fake:
        assert main.main(["bench", "--target", fake.target, "--requests", "5", "--speculation", "3"]) == 0
    assert {request.scheduling.speculation for request in fake.requests} == {3}
    told = capsys.readouterr().out
    assert main.main(["bench", "--speculation", "8"]) == 2
    assert "at most 3 drafts a step" in told and "40 tokens drafted, 75% of them right" in told


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_a_thread(SCRIPT) as fake:
        assert main.main(["bench", "--target", fake.target, "--rate", "50", "--requests", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["options"]["rate"] == 50
    assert (told["completed"], told["failures"]) == (5, {})
    assert (told["output_tokens"], told["prompt_tokens"], told["tokens_per_message"]) == (15, 25, 1.0)
    assert 0 < told["ttft_s"]["p50"] <= told["ttft_s"]["p99"] <= told["total_s"]["p99"]


def test_ctrl_c_reports_on_the_requests_that_have_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench_module, "_progress", lambda total: nullcontext(lambda _: signal.raise_signal(signal.SIGINT))
    )
    with serving_in_a_thread(SCRIPT, ["hang"]) as fake:
        arguments = ["bench", "--target", fake.target, "--requests", "3", "--concurrency", "1", "--json"]
        assert main.main(arguments) == main.INTERRUPTED
    captured = capsys.readouterr()
    assert captured.err.strip() == "photon-grpc: interrupted after 1 of 3 requests"
    assert json.loads(captured.out)["completed"] == 1


def test_failures_are_counted_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    full = [Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", [error_info("QUEUE_FULL")])]
    with serving_in_a_thread(SCRIPT, full, SCRIPT, full) as fake:
        assert main.main(["bench", "--target", fake.target, "--concurrency", "1", "--requests", "4"]) == 0
        assert "2 failed with QUEUE_FULL: no room" in capsys.readouterr().out
        assert main.main(["bench", "--target", fake.target, "--requests", "2"]) == 1
    assert "0 completed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "sent"),
    [
        ("p.txt", "one\n\ntwo words\n", ["one", "two words", "one"]),
        ("p.jsonl", '"a\\nb"\n[1, 2]\n{"prompt": "c", "id": 7}\n', ["a\nb", [1, 2], "c"]),
    ],
)
def test_prompts_come_from_a_file(name: str, text: str, sent: list[Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    flags = ["--prompt-file", str(tmp_path / name), "--requests", "3", "--concurrency", "1"]
    with serving_in_a_thread(SCRIPT) as fake:
        assert main.main(["bench", "--target", fake.target, *flags]) == 0
    assert [request.text or list(request.token_ids.ids) for request in fake.requests] == sent


@pytest.mark.parametrize("text", ["", "\n", "{}", "[]", "[1.5]", "[-1]", "nonsense"])
def test_a_file_without_prompts_is_one_line_and_exit_code_2(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with serving_in_a_thread(SCRIPT) as fake:
        assert main.main(["bench", "--target", fake.target, "--prompt-file", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"photon-grpc: --prompt-file: {path}")


def test_a_missing_server_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "--target", f"unix:{tmp_path}/nobody"]) == 1
    assert "photon-grpc serve" in capsys.readouterr().err


def test_lengths_beyond_the_context_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(PromptTooLong) as refused:
        plan(BenchOptions("t", input_tokens=1000, output_tokens=25), MODEL)
    assert (refused.value.needed, refused.value.limit) == (1025, 1024)


def test_an_open_loop_arrives_at_its_rate_and_alike_each_time() -> None:
    options = BenchOptions("t", rate=20.0, requests=2000, input_tokens=1)
    starts = [session.start_s for session in plan(options, MODEL)]
    distances = [after - before for before, after in zip([0.0, *starts], starts, strict=False)]
    assert min(distances) >= 0
    assert statistics.mean(distances) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(distances) == pytest.approx(1 / 20, rel=0.1)
    assert starts == [session.start_s for session in plan(options, MODEL)]


def test_unset_options_follow_from_those_that_are_set() -> None:
    assert (BenchOptions("t").places, BenchOptions("t").num_requests) == (16, 64)
    open_loop = BenchOptions("t", rate=3.0)
    assert (open_loop.places, open_loop.num_requests) == (None, 30)
    assert BenchOptions("t", concurrency=64, processes=5).num_processes == 5


class Watched(FakeServer):
    """Answers with ids of its own, and knows how many calls there were at a time."""

    in_flight = most = 0

    async def StreamGenerate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        self.requests.append(request)
        first = message(start=True)
        first.deltas[0].token_ids.extend([7, len(self.requests)])
        yield first
        yield message(finish=pb.FINISH_REASON_MAX_TOKENS)
        self.in_flight -= 1


async def test_at_most_the_given_number_run_at_a_time() -> None:
    async with serving(Watched()) as fake:
        load = Workload(fake.target, [Session([Turn([number], 3)]) for number in range(12)], concurrency=3)
        answers = await run_load(load, num_processes=2)
    assert isinstance(fake, Watched)
    assert fake.most <= 3
    assert sorted(answer.session for answer in answers) == list(range(12))


async def test_a_conversation_carries_its_history() -> None:
    async with serving(Watched()) as fake:
        load = Workload(fake.target, [Session([Turn([1, 2], 3), Turn([3], 3), Turn([4], 3)], keeps_history=True)])
        answers = await run_load(load)
    assert [answer.turn for answer in answers] == [0, 1, 2]
    prompts = [list(request.token_ids.ids) for request in fake.requests]
    assert prompts == [[1, 2], [1, 2, 7, 1, 3], [1, 2, 7, 1, 3, 7, 2, 4]]


async def test_a_conversation_ends_with_its_first_failure() -> None:
    async with serving(FakeServer([Refusal(grpc.StatusCode.INTERNAL, "broken")])) as fake:
        sessions = [Session([Turn([1], 3)] * 3, keeps_history=True), Session([Turn([1], 3)] * 3)]
        answers = await run_load(Workload(fake.target, sessions))
    assert sorted((answer.session, answer.turn) for answer in answers) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert {answer.reason for answer in answers} == {"INTERNAL_FAILURE"}


async def test_a_client_process_that_breaks_ends_the_load() -> None:
    async with serving(FakeServer(SCRIPT)) as fake:
        with pytest.raises(InternalFailure, match="client process 0"):
            await run_load(Workload(fake.target, [Session([Turn([-1], 3)])]))


@given(st.lists(st.floats(0, 1e3), max_size=300))
def test_percentiles(values: list[float]) -> None:
    found = Percentiles.of(values)
    for q, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        if values:
            assert sum(other < value for other in values) <= len(values) * q
            assert sum(other <= value for other in values) > len(values) * q
        else:
            assert value == 0


def test_rates_are_over_the_time_from_the_first_send_to_the_last_end() -> None:
    answers = [
        RequestResult(
            0, 0, sent_s=1.0, late_s=0, first_s=0.5, gaps_s=[0.25, 0.25], total_s=1.0, prompt_tokens=10, output_tokens=5
        ),
        RequestResult(
            1, 0, sent_s=2.0, late_s=0, first_s=0.5, gaps_s=[], total_s=3.0, prompt_tokens=10, output_tokens=1
        ),
        RequestResult(
            2, 0, sent_s=2.0, late_s=0, first_s=0.1, gaps_s=[], total_s=0.1, reason="QUEUE_FULL", message="full"
        ),
    ]
    found = summarize(answers)
    assert (found.completed, found.failed, found.duration_s) == (2, 1, 4.0)
    assert (found.output_tokens_per_s, found.prompt_tokens_per_s, found.requests_per_s) == (1.5, 5.0, 0.5)
    assert found.tokens_per_message == 6 / 4
    assert found.tpot_s.p50 == 0.125
    assert found.failures["QUEUE_FULL"].message == "full"
    assert summarize([]).completed == 0
