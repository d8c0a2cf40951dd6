"""The serving workloads against the real service with the embedded model, small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import serve, traffic
from benchmarks.service import free_address, serving
from photon_grpc import demo
from photon_grpc.cli.load.load import Session

pytestmark = [pytest.mark.slow, pytest.mark.full]


def short(sessions: list[Session]) -> list[Session]:
    """The same with answers of eight tokens: what is measured here takes no time worth measuring."""
    return [Session([replace(turn, output_tokens=8) for turn in session.turns]) for session in sessions]


def test_the_service_answers_closed_loops_and_agents(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = traffic.closed
    monkeypatch.setattr(traffic, "closed", lambda run, concurrency: short(closed(run, concurrency)))
    http = free_address()
    with serving("--device", "cpu", "--model", str(demo.DRAFT), "--http-listen", http) as target:
        clients = serve.Clients(target, num_processes=2)
        sessions = traffic.agent(1, 1.0, 0.06)
        answers = clients.send(sessions)
        serve.others(clients, ["sequence"], 0.03)
        apis = ["--target", target, "--http-target", http, "--api", "grpc", "http"]
        args = serve.arguments(["--shape", "demo", *apis, "--concurrency", "1", "2", "--logprobs", "5"])
        serve.measure(target, http, args)
    for answer in answers:
        # 64 new ids, and of every earlier turn 64 asked and 64 answered, of which the cache holds all whole blocks of
        # 16.
        assert answer.prompt_tokens == 64 + 128 * answer.turn
        assert answer.output_tokens == 64
        assert answer.cached_prompt_tokens >= 128 * answer.turn - 16
    assert serve.sessions_of_agents(answers).endswith("of the history cached from the second turn on")
    shown = capsys.readouterr().out
    assert "| sequence | 1 |" in shown
    rows = [line.split(" | ")[:2] for line in shown.splitlines() if " | grpc | " in line or " | http | " in line]
    assert rows == [["| 1", "grpc"], ["| 1", "http"], ["| 2", "grpc"], ["| 2", "http"]]


@pytest.mark.parametrize("wrong", [["--multiplex"], ["--ids"], ["--work", "agent"], ["--target", "localhost:1"]])
def test_what_http_lacks_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.arguments(["--api", "http", *wrong])
    assert "--api" in capsys.readouterr().err
