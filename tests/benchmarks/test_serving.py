"""The serving workloads against the real service with the embedded model, small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import serve, traffic
from benchmarks.service import serving
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
    with serving("--device", "cpu", "--model", str(demo.DRAFT)) as target:
        clients = serve.Clients(target, num_processes=2)
        sessions = traffic.agent(1, 1.0, 0.06)
        answers = clients.send(sessions)
        serve.others(clients, ["sequence"], 0.03)
        args = serve.arguments(["--shape", "demo", "--target", target, "--concurrency", "1", "--logprobs", "5"])
        serve.measure(target, args)
    for answer in answers:
        # 64 new ids, and of every earlier turn 64 asked and 64 answered, of which the cache holds all whole blocks of
        # 16.
        assert answer.prompt_tokens == 64 + 128 * answer.turn
        assert answer.output_tokens == 64
        assert answer.cached_prompt_tokens >= 128 * answer.turn - 16
    assert serve.sessions_of_agents(answers).endswith("of the history cached from the second turn on")
    shown = capsys.readouterr().out
    assert "| sequence | 1 |" in shown
    assert "\n| 1 | " in shown
