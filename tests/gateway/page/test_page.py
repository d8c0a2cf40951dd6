"""The page in headless Chromium, on a server that answers what the test says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.page.conftest import Watched
from tests.gateway.page.fake_engine import FakeEngine
from tests.gateway.page.fake_server import FakeHttpServer, opened

MANY_WORDS = [{"content": f"word{number} "} for number in range(2000)]
HELLO = [{"content": "Hello "}, {"content": "there"}]
ADMITTED, PREEMPTED, ENDED = 1, 2, 4


def send(page: Any, text: str) -> None:
    until(page, "!document.getElementById('send').disabled")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def until(page: Any, holds: str | Callable[[], bool]) -> None:
    """Wait until a condition of the page or of the server holds. The policy forbids Playwright's own way, an eval."""
    for _ in range(400):
        if holds() if callable(holds) else page.evaluate(holds):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never: {holds}")


def finished(page: Any, words: str) -> None:
    page.locator("#logs .turn:last-child .figures", has_text=words).wait_for()


def test_a_chat_streams_and_the_picture_runs(tab: Watched) -> None:
    server = FakeHttpServer(lambda _: HELLO)
    with opened(server) as url, tab.at(url) as page:
        send(page, "Say hello")
        finished(page, "reached the most tokens")
        assert page.inner_text("#logs .turn:last-child .text") == "Hello there"
        figures = page.inner_text("#logs .turn:last-child .figures")
        assert "first token after" in figures and "tokens/s" in figures and "2 written" in figures
        until(page, "photonPicture.totals.ended === 1")
        path, body = server.calls[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Say hello"}]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert "temperature" not in body and "seed" not in body


@pytest.mark.full
def test_parameters_and_the_system_prompt_are_sent(tab: Watched) -> None:
    server = FakeHttpServer(lambda _: HELLO)
    with opened(server) as url, tab.at(url) as page:
        page.click("#parameters > summary")
        for name, value in (("temperature", "0.5"), ("top-p", "0.9"), ("max-tokens", "7"), ("seed", "24")):
            page.fill(f"#{name}", value)
        page.fill("#system", "Be brief.")
        send(page, "Hi")
        finished(page, "written")
    body = server.calls[0][1]
    assert (body["temperature"], body["top_p"], body["max_completion_tokens"], body["seed"]) == (0.5, 0.9, 7, 24)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.full
@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_ends_the_call_and_keeps_the_text(tab: Watched, way: str) -> None:
    server = FakeHttpServer(lambda _: MANY_WORDS)
    with opened(server) as url, tab.at(url) as page:
        send(page, "Go on and on")
        page.locator("#logs .text", has_text="word3").wait_for()
        if way == "button":
            page.click("#stop")
        else:
            page.keyboard.press("Escape")
        finished(page, "stopped here")
        until(page, "photonPicture.totals.ended === 1")
        text = page.inner_text("#logs .turn:last-child .text")
        assert page.is_enabled("#send") and page.is_disabled("#stop")
        until(page, lambda: server.num_left == 1)
    assert text.startswith("word0 word1") and "word1999" not in text


@pytest.mark.full
def test_regenerate_replaces_the_answer_and_asks_the_same(tab: Watched) -> None:
    answers = iter(["first", "second", "third"])
    server = FakeHttpServer(lambda _: [{"content": next(answers)}])
    with opened(server) as url, tab.at(url) as page:
        send(page, "Guess")
        finished(page, "written")
        page.click("#regenerate")
        page.locator("#logs .turn:last-child .text", has_text="second").wait_for()
        finished(page, "written")
        assert page.locator("#logs .turn").count() == 2
        send(page, "Again")
        page.locator("#logs .turn:last-child .text", has_text="third").wait_for()
    bodies = [body["messages"] for _, body in server.calls]
    assert bodies[1] == bodies[0]
    assert [(each["role"], each["content"]) for each in bodies[2]] == [
        ("user", "Guess"), ("assistant", "second"), ("user", "Again")
    ]  # fmt: skip


@pytest.mark.full
def test_conversations_are_apart_and_end_with_the_tab(tab: Watched) -> None:
    server = FakeHttpServer(lambda body: [{"content": f"to {body['messages'][-1]['content']}"}])
    with opened(server) as url, tab.at(url) as page:
        send(page, "one")
        finished(page, "written")
        page.click("#new-session")
        assert page.locator("#logs .turn").count() == 0
        send(page, "two")
        finished(page, "written")
        page.select_option("#session", index=0)
        assert "to one" in page.inner_text("#logs") and "to two" not in page.inner_text("#logs")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.reload()
        assert page.locator("#logs .turn").count() == 0
    assert len(server.calls[1][1]["messages"]) == 1


@pytest.mark.full
def test_a_missing_key_is_asked_for_and_the_call_sent_again(tab: Watched) -> None:
    server = FakeHttpServer(lambda _: HELLO)
    with opened(server) as url, tab.at(url) as page:
        until(page, "!document.getElementById('send').disabled")
        server.key = "secret"
        send(page, "Say hello")
        page.locator("#key-form").wait_for()
        assert "401 UNAUTHENTICATED: the call has no API key" in page.inner_text("#key-reason")
        assert "401 UNAUTHENTICATED" in page.inner_text("#logs .error")
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        until(page, "document.activeElement.id === 'key'")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        finished(page, "written")
        assert page.inner_text("#logs .turn:last-child .text") == "Hello there"
        page.locator("#feed-state", has_text="8 slots").wait_for()
        assert page.is_hidden("#key-form") and "secret" not in page.url


@pytest.mark.full
def test_a_key_that_is_wanted_from_the_beginning(tab: Watched) -> None:
    server = FakeHttpServer(lambda _: HELLO, key="secret")
    with opened(server) as url, tab.at(url) as page:
        page.locator("#feed-state", has_text="The picture needs an API key").wait_for()
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.locator("#serving", has_text="fake-model").wait_for()
        page.locator("#feed-state", has_text="8 slots").wait_for()


@pytest.mark.full
@pytest.mark.parametrize(
    ("deltas", "shown"),
    [
        ([{"refused": (400, "PROMPT_TOO_LONG", "the prompt has 9 tokens; the limit is 4")}],
         "400 PROMPT_TOO_LONG: the prompt has 9 tokens; the limit is 4"),
        ([{"refused": (503, "OVERLOADED", "the queue is full")}], "503 OVERLOADED: the queue is full"),
        ([{"content": "half "}, {"error": {"message": "the engine failed", "code": "ENGINE_FAILED"}}],
         "ENGINE_FAILED: the engine failed"),
    ],
)  # fmt: skip
def test_errors_are_shown_in_full(tab: Watched, deltas: list[Any], shown: str) -> None:
    with opened(FakeHttpServer(lambda _: deltas)) as url, tab.at(url) as page:
        send(page, "Fail")
        page.locator("#logs .error", has_text=shown).wait_for()
        assert page.get_attribute("#logs .error", "role") == "alert"
        assert page.is_enabled("#send") and page.is_enabled("#regenerate")
    tab.told = [each for each in tab.told if "status of 503" not in each]


@pytest.mark.full
def test_markup_of_the_model_stays_text(tab: Watched) -> None:
    markup = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    call = {"index": 0, "function": {"name": markup, "arguments": markup}}
    deltas = [{"reasoning_content": markup}, {"content": markup}, {"tool_calls": [call]}, {"content": markup}]
    server = FakeHttpServer(lambda _: deltas)
    with opened(server) as url, tab.at(url) as page:
        send(page, markup)
        finished(page, "written")
        page.click("#logs .reasoning summary")
        turn = page.locator("#logs .turn:last-child")
        assert turn.locator("> .text").inner_text() == markup * 2
        assert turn.locator(".reasoning .text").inner_text() == markup
        assert turn.locator("pre").inner_text() == f"calls the tool {markup} {markup}"
        assert page.locator("img, #logs script").count() == 0
        assert page.title() == "photon_grpc"
        deltas[:] = [{"refused": (400, markup, markup)}]
        page.click("#regenerate")
        page.locator("#logs .error", has_text=f"400 {markup}: {markup}").wait_for()


@pytest.mark.full
def test_without_a_chat_template_a_text_is_continued(tab: Watched) -> None:
    server = FakeHttpServer(lambda _: HELLO, has_chat=False)
    with opened(server) as url, tab.at(url) as page:
        page.locator("#chat-title", has_text="Completion").wait_for()
        assert page.is_hidden("#system-choice")
        send(page, "Once upon a time\n")
        finished(page, "written")
        assert page.inner_text("#logs .turn:last-child .text") == "Hello there"
    path, body = server.calls[0]
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", "Once upon a time\n", 256)


@pytest.mark.full
def test_eight_requests_run_at_once_beside_a_chat(tab: Watched) -> None:
    """A browser has six connections to a server; the feed and a chat have two of them."""
    server = FakeHttpServer(lambda _: MANY_WORDS, engine=FakeEngine(num_slots=16, num_blocks=4000))
    with opened(server) as url, tab.at(url) as page:
        send(page, "Go on and on")
        page.click("#run-many")
        until(page, "photonPicture.lanes.filter((lane) => lane.segments.length).length === 9")
        texts = page.locator("#many-answers .text")
        until(page, "[...document.querySelectorAll('#many-answers .text')].every((each) => each.innerText)")
        assert texts.count() == 8
        page.keyboard.press("Escape")
        page.locator("#many-answers .turn:last-child .figures", has_text="stopped here").wait_for()
        until(page, "photonPicture.totals.ended === 9")
    assert sum(len(body["prompt"]) for path, body in server.calls if path == "/v1/completions") == 8


def frame(time_s: float, lanes: list[list[int]], steps: int = 4, **changes: Any) -> dict[str, Any]:
    rows = [[0.02, sum(lane[6] for lane in lanes), sum(lane[7] for lane in lanes)]] * steps
    return {
        "time_s": time_s, "num_slots": 8, "num_blocks": 64, "block_size": 16, "device": "cpu", "steps": rows,
        "num_steps": steps, "lanes": lanes, "queued": 0, "output_tokens_per_s": 40.0, "prompt_tokens_per_s": 0.0,
        "blocks": {"owned": 10, "cached": 4, "limbo": 2, "free": 48}, **changes,
    }  # fmt: skip


#: slot, sequence, prompt, cached, computed, output, prefilled, decoded, marks
RECORDED = [
    frame(1.0, [[0, 1, 64, 0, 64, 0, 64, 0, ADMITTED]]),
    frame(1.1, [[0, 1, 64, 0, 68, 4, 0, 4, 0], [2, 2, 80, 48, 82, 2, 32, 2, ADMITTED]]),
    frame(1.2, [[0, 1, 64, 0, 72, 8, 0, 4, ENDED], [2, 2, 80, 48, 86, 6, 0, 4, PREEMPTED]], queued=1),
    frame(1.3, [[0, 3, 80, 80, 85, 6, 5, 0, ADMITTED], [2, 2, 80, 48, 0, 6, 0, 0, 0], [3, 4, 9, 0, 9, 0, 0, 0, 0]]),
    frame(1.4, [[0, 3, 80, 80, 86, 7, 0, 1, ENDED], [0, 5, 9, 0, 9, 1, 8, 1, ADMITTED], [3, 4, 9, 0, 9, 0, 0, 0, 0]]),
]


@pytest.mark.full
def test_the_picture_draws_what_the_frames_say(tab: Watched) -> None:
    with opened(FakeHttpServer(pictures=RECORDED)) as url, tab.at(url) as page:
        until(page, "photonPicture.totals.frames === 5")
        drawn = page.evaluate("photonPicture")
        page.click("#summary > summary")
        table = page.inner_text("#summary-rows")
        painted = page.evaluate("""new Set(new Uint32Array(document.getElementById("lanes").getContext("2d")
            .getImageData(0, 0, 2000, 400).data.buffer)).size""")
    lanes = {lane["slot"]: lane for lane in drawn["lanes"]}
    runs = {slot: [(each["sequence"], each["kind"]) for each in lane["segments"]] for slot, lane in lanes.items()}
    assert runs == {
        0: [(1, "prefill"), (1, "decode"), (3, "prefill"), (3, "decode"), (5, "prefill"), (5, "decode")],
        2: [(2, "prefill"), (2, "decode")],
        3: [(4, "held")],
    }
    marks = {slot: [(each["sequence"], each["kind"]) for each in lane["marks"]] for slot, lane in lanes.items()}
    assert marks == {
        0: [(1, "admitted"), (1, "ended"), (3, "admitted"), (3, "hit"), (3, "ended"), (5, "admitted")],
        2: [(2, "admitted"), (2, "hit"), (2, "preempted")],
        3: [(4, "admitted")],
    }
    assert lanes[0]["segments"][1]["tokens"] == 8
    assert drawn["totals"] == {"frames": 5, "admitted": 5, "preempted": 1, "ended": 2, "hits": 2}
    assert drawn["blocks"] == {"owned": 10, "cached": 4, "limbo": 2, "free": 48}
    assert "2 of 8" in table and "sequence 5: decode, prompt of 9 tokens (0 from the cache), 1 written" in table
    assert painted > 5
    segments = lanes[0]["segments"]
    assert all(one["to_s"] <= other["from_s"] + 1e-9 for one, other in itertools.pairwise(segments))


@pytest.mark.full
def test_an_engine_that_starts_again_begins_a_new_picture(tab: Watched) -> None:
    again = frame(0.1, [[1, 1, 5, 0, 5, 1, 4, 1, ADMITTED]])
    with opened(FakeHttpServer(pictures=[*RECORDED, again])) as url, tab.at(url) as page:
        until(page, "photonPicture.totals.frames === 1 && photonPicture.lanes[0].slot === 1")
        page.locator("#feed-state", has_text="Engine restarting").wait_for()


@pytest.mark.full
def test_the_feed_is_closed_while_the_tab_is_hidden(tab: Watched) -> None:
    server = FakeHttpServer()
    with opened(server) as url, tab.at(url) as page:
        until(page, "photonPicture.totals.frames > 2")
        for is_hidden, feeds in ((True, 0), (False, 1)):
            page.evaluate(
                """(value) => { Object.defineProperty(document, "hidden", {value, configurable: true});
                document.dispatchEvent(new Event("visibilitychange")); }""",
                is_hidden,
            )
            until(page, lambda feeds=feeds: server.num_feeds == feeds)


@pytest.mark.full
def test_everything_is_reached_and_done_by_keyboard(tab: Watched) -> None:
    with opened(FakeHttpServer(lambda _: HELLO)) as url, tab.at(url) as page:
        until(page, "!document.getElementById('send').disabled && photonPicture.totals.frames")
        reached = []
        for _ in range(24):
            page.keyboard.press("Tab")
            at, outline = page.evaluate(
                "[document.activeElement.id || document.activeElement.tagName,"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
            assert outline != "none" or at == "BODY", at
            reached.append(at)
        wanted = [
            "key-button", "theme-button", "session", "new-session", "delete-session", "logs", "prompt", "send",
            "SUMMARY", "run-many", "pause", "lanes", "blocks", "tile-tokens", "tile-step", "tile-queue", "SUMMARY",
        ]  # fmt: skip
        assert [each for each in reached if each in wanted][: len(wanted)] == wanted
        page.focus("#lanes")
        for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp"):
            page.keyboard.press(key)
        assert "Slot 0, 0.3 s ago: free." in page.inner_text("#explained")
        page.focus("#theme-button")
        page.keyboard.press("Enter")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
        page.focus("#prompt")
        page.keyboard.type("Hi")
        page.keyboard.press("Enter")
        finished(page, "written")


@pytest.mark.full
def test_nothing_is_wider_than_a_phone(tab: Watched) -> None:
    long_word = [
        {"content": "x" * 500},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "y" * 500}}]},
    ]
    with opened(FakeHttpServer(lambda _: long_word)) as url, tab.at(url) as page:
        page.set_viewport_size({"width": 360, "height": 740})
        send(page, "z" * 300)
        finished(page, "written")
        page.click("#key-button")
        page.click("#parameters > summary")
        page.click("#run-many")
        until(page, "photonPicture.lanes.length > 7")
        page.click("#summary > summary")
        assert page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [360, 360]
        # Long words of the chat break, too.
        assert page.evaluate("(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)(logs)") == 0
        outside = page.evaluate(
            """[...document.querySelectorAll("button, input, select, textarea, canvas")].filter((each) =>
            !each.closest("#many-answers") && each.getBoundingClientRect().right > 360.5).map((each) => each.id)"""
        )
    assert outside == []
