"""Stop strings against a search over the whole text after every token."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from photon_grpc.frontend.output.stop_strings import StopMatcher, StopStrings
from tests.examples import examples

PIECES = st.lists(st.text("abc", min_size=0, max_size=4), max_size=14)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def oracle(pieces: list[str], stops: list[str], min_tokens: int, include: bool) -> tuple[str, str | None, int]:
    """Return (text, stop string, tokens) of the first match that ends, the longest of those.

    It ends in the first token that may end the output.
    """
    text = ""
    for n, piece in enumerate(pieces, start=1):
        for end in range(len(text) + 1, len(text) + len(piece) + 1):
            found = [stop for stop in stops if (text + piece)[:end].endswith(stop)]
            if found and n >= min_tokens:
                stop = max(found, key=len)
                return (text + piece)[: end if include else end - len(stop)], stop, n
        text += piece
    return text, None, len(pieces)


def run(pieces: list[str], stops: list[str], min_tokens: int, include: bool) -> tuple[str, str | None, int, list[str]]:
    matcher = StopMatcher(StopStrings(tuple(stops)), include_stop_in_text=include)
    released = []
    for n, piece in enumerate(pieces, start=1):
        released.append(matcher.push(piece, n >= min_tokens))
        if matcher.matched is not None:
            return "".join(released), matcher.matched, n, released
    released.append(matcher.flush())
    return "".join(released), None, len(pieces), released


@settings(max_examples=examples(800), deadline=None)
@given(pieces=PIECES, stops=STOPS, min_tokens=st.integers(0, 8), include=st.booleans())
@example(pieces=["a", "b", "c"], stops=["abc", "bc", "c"], min_tokens=0, include=False)
@example(pieces=["aab", "aab", "c"], stops=["aabaac"], min_tokens=0, include=False)
def test_equals_a_search_over_the_whole(pieces: list[str], stops: list[str], min_tokens: int, include: bool) -> None:
    text, stop, num_tokens, _ = run(pieces, stops, min_tokens, include)
    assert (text, stop, num_tokens) == oracle(pieces, stops, min_tokens, include)


@settings(max_examples=examples(400), deadline=None)
@given(pieces=PIECES, stops=STOPS)
def test_holds_back_exactly_what_could_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(tuple(stops)))
    text = released = ""
    for piece in pieces:
        text += piece
        released += matcher.push(piece, True)
        if matcher.matched is not None:
            return
        longest = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        assert released == text[: len(text) - longest]


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text("ab", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_cutting_the_text_elsewhere_changes_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    assert run(pieces, stops, 0, False)[:2] == run([text], stops, 0, False)[:2]


@settings(max_examples=examples(100), deadline=None)
@given(
    beginning=st.text("ab", min_size=1, max_size=6),
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=12),
    pieces=PIECES,
)
def test_stop_strings_that_begin_alike_are_told_apart(beginning: str, counts: list[int], pieces: list[str]) -> None:
    stops = [beginning * count + "c" for count in counts]
    pieces = [beginning * 9, *pieces]
    assert run(pieces, stops, 0, False)[:2] == oracle(pieces, stops, 0, False)[:2]


def test_only_what_a_text_reaches_of_the_largest_stop_strings_is_prepared() -> None:
    """Else one request with 64 of 1 KiB holds up all other streams of its front end for tens of milliseconds."""
    stops = StopStrings(tuple("a" * 1000 + chr(0x4E00 + number) for number in range(64)))
    assert len(stops.depths) == 1
    matcher = StopMatcher(stops)
    assert matcher.push("a" * 3000, True) == "a" * 2000
    assert len(stops.depths) == 1001
    assert matcher.push("b", True) == "a" * 1000 + "b"
    assert len(stops.depths) == 1001
