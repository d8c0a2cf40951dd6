from __future__ import annotations

import io

import pytest

from photon_grpc.compose import console
from photon_grpc.core.frames import Facts
from tests.kv_plans import kv_plan

FACTS = Facts(128, 256, kv_plan(16), 8, 4, 64, 16, 1024, "NVIDIA H200", "bfloat16")


class Terminal(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_the_ready_line_leaves_out_what_is_not_known():
    line = console.ready_line(("a:1", "unix:/b"), "m", FACTS)
    assert line == "ready on a:1, unix:/b · m · NVIDIA H200 bfloat16 · 8 KV blocks of 16 tokens"


def test_the_ready_line_names_the_pages_of_the_http_server():
    for has_tls, scheme in ((False, "http"), (True, "https")):
        pages = console.page_urls(("a:8000", "[::1]:8001"), has_tls=has_tls)
        line = console.ready_line(("a:1",), "m", FACTS, pages)
        assert line.startswith(f"ready on a:1 · {scheme}://a:8000/, {scheme}://[::1]:8001/ · m · ")


def test_without_a_terminal_loading_says_a_line_now_and_then(monkeypatch, caplog):
    caplog.set_level("INFO")
    display = console.LoadingDisplay(Terminal(False))
    for done in range(1000):
        display.show("weights", done, 1000)
    assert caplog.messages == []
    monkeypatch.setattr(console, "_PROGRESS_INTERVAL_S", 0.0)
    display.show("weights", 500, 1000)
    display.show("warm-up", 0, 1)
    display.close()
    assert caplog.messages == ["loading: weights 50 %", "loading: warm-up"]


def test_on_a_terminal_loading_is_a_bar(monkeypatch):
    terminal = Terminal(True)
    display = console.LoadingDisplay(terminal)
    display.show("weights", 500, 1000)
    display.show("weights", 1000, 1000)
    display.close()
    assert "weights" in terminal.getvalue()


@pytest.mark.parametrize(("is_shown", "drawn"), [(True, True), (False, False)])
def test_a_bar_of_prompts_is_drawn_only_when_wanted(monkeypatch, is_shown, drawn):
    terminal = Terminal(True)
    monkeypatch.setattr(console.sys, "stderr", terminal)
    with console.bar_of("prompts", 3, is_shown) as advance:
        advance()
    assert ("prompts" in terminal.getvalue()) == drawn
