"""Grammars of llguidance: compiled in a thread, kept within bounds, and masks in which only what satisfies may end."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import llguidance
import pytest

from photon_grpc import demo
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.core.constraint import Constraint
from photon_grpc.core.ports import Event
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.engine.grammar import NoGrammars
from photon_grpc.engine.guidance import GuidanceGrammars, GuidanceMatcher, read_vocabulary
from photon_grpc.errors import FeatureNotSupported, InvalidConstraint
from photon_grpc.frontend.ask import ConstraintAsk
from photon_grpc.frontend.constraint import write_grammar
from photon_grpc.frontend.tokenizer import Tokenizer

CARD = read_model_dir(demo.TARGET)
VOCABULARY = read_vocabulary(CARD)
TOKENIZER = Tokenizer.from_file(CARD.path / "tokenizer.json")
EOS = CARD.eos_token_ids
MASK_BYTES = CARD.vocab_size // 8


def ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def request(constraint: Constraint | None, stop: StopParams | None = None) -> Request:
    return Request("r", (7,), SamplingParams(), stop or StopParams(9, eos_token_ids=EOS), 0.0, constraint=constraint)


def regex(text: str) -> Constraint:
    return write_grammar(ConstraintAsk("regex", text))


class Compiled:
    """Grammars, and what has woken the engine."""

    def __init__(self, num_threads: int = 1, max_cache_bytes: int = 2**30) -> None:
        assert VOCABULARY is not None
        self.woken: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.grammars = GuidanceGrammars(VOCABULARY, self.woken.put, num_threads, max_cache_bytes)

    def matcher(self, constraint: Constraint, stop: StopParams | None = None) -> GuidanceMatcher:
        asked = request(constraint, stop)
        event = self.grammars.awaits(asked)
        while event is not None and self.woken.get(timeout=30) is not event:
            pass  # of one that was compiled before it was awaited
        matcher = self.grammars.matcher(asked)
        assert matcher is not None
        return matcher


def allowed(matcher: GuidanceMatcher) -> set[int]:
    mask = memoryview(bytearray(MASK_BYTES))
    matcher.fill(mask)
    return {id for id in range(CARD.vocab_size) if mask[id // 8] >> id % 8 & 1}


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return Compiled()


def test_a_grammar_is_compiled_once_in_a_thread_that_wakes_the_engine() -> None:
    compiled = Compiled()
    asked, other = request(regex("a+")), request(regex("b+"))
    events = {compiled.grammars.awaits(asked), compiled.grammars.awaits(other)} - {None}
    assert {compiled.woken.get(timeout=30), compiled.woken.get(timeout=30)} >= events
    assert compiled.grammars.awaits(asked) is None and compiled.grammars.awaits(request(regex("a+"))) is None
    assert compiled.grammars.matcher(asked) is not compiled.grammars.matcher(asked)
    assert compiled.grammars.awaits(request(None)) is None and compiled.grammars.matcher(request(None)) is None


def test_what_does_not_compile_refuses_the_request(compiled: Compiled) -> None:
    for wrong in (Constraint("regex", "no JSON"), Constraint("lark", '{"grammars": [{"lark_grammar": "start: x"}]}')):
        with pytest.raises(InvalidConstraint):
            compiled.matcher(wrong)
    with pytest.raises(FeatureNotSupported):
        NoGrammars().matcher(request(regex("a")))


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    compiled = Compiled(max_cache_bytes=3 * 2**20 + 2**16)
    first, second, third, fourth = (regex(f"{letter}+") for letter in "abcd")
    for constraint in (first, second, third, first, fourth):
        compiled.matcher(constraint)
    assert {*compiled.grammars._cache} == {third, first, fourth}


def test_more_than_the_cache_holds_wait_and_each_is_compiled_once() -> None:
    compiled = Compiled(max_cache_bytes=2 * 2**20)
    asked = [request(regex(f"{letter}+")) for letter in "abcdef"]
    waiting = {event: each for each in asked if (event := compiled.grammars.awaits(each)) is not None}
    while waiting:
        event = compiled.woken.get(timeout=30)
        if event in waiting:
            assert compiled.grammars.awaits(waiting.pop(event)) is None
    assert len(compiled.grammars._cache) == 1


@pytest.mark.parametrize("end", [EOS, (300,), (*EOS, 300)])
def test_only_what_satisfies_may_end(compiled: Compiled, end: tuple[int, ...]) -> None:
    stop = StopParams(9, eos_token_ids=tuple(set(end) & set(EOS)), stop_token_ids=tuple(set(end) - set(EOS)))
    matcher = compiled.matcher(regex("ab*"), stop)
    assert not allowed(matcher) & {*end, *EOS}
    assert matcher.accept(ids("a")[0])
    assert allowed(matcher) & {*EOS, 300} == set(end)
    assert not matcher.is_complete


def test_a_matcher_walks_back_and_refuses_what_may_not_follow(compiled: Compiled) -> None:
    matcher = compiled.matcher(regex("def x"))
    beginning = allowed(matcher)
    assert not matcher.accept(ids("class")[0])
    tokens = ids("def x")
    for token in tokens:
        assert token in allowed(matcher) and matcher.accept(token)
    assert matcher.is_complete
    matcher.roll_back(len(tokens))
    assert allowed(matcher) == beginning and not matcher.is_complete


def test_many_are_filled_as_each_alone() -> None:
    compiled = Compiled(num_threads=2)
    constraints = [regex("a+"), regex("[0-9]{3}"), write_grammar(ConstraintAsk("json_object")), regex("a+")]
    matchers = {2 * at: compiled.matcher(constraint) for at, constraint in enumerate(constraints)}
    matchers[0].accept(ids("a")[0])
    masks = memoryview(bytearray(b"\xff" * (8 * MASK_BYTES)))
    assert compiled.grammars.fill(matchers, masks, MASK_BYTES) == {}
    for at, matcher in matchers.items():
        alone = memoryview(bytearray(MASK_BYTES))
        matcher.fill(alone)
        assert masks[at * MASK_BYTES : (at + 1) * MASK_BYTES] == alone
        assert bytes(masks[(at + 1) * MASK_BYTES : (at + 2) * MASK_BYTES]) == b"\xff" * MASK_BYTES


def lexers(matchers: dict[int, GuidanceMatcher]) -> int:
    return len({id(matcher.beginning) for matcher in matchers.values()})


def test_rows_of_one_grammar_get_lexers_of_their_own_as_many_as_threads() -> None:
    compiled = Compiled(num_threads=3)
    constraint, masks = regex("[a-z]+ [0-9]{3}"), memoryview(bytearray(5 * MASK_BYTES))
    first = {at: compiled.matcher(constraint) for at in range(5)}
    assert lexers(first) == 1, "there is one compilation until a step has shown that more are of use"
    grammar = first[0].grammar
    compiled.grammars.fill({0: first[0], 1: first[1]}, masks, MASK_BYTES)
    compiled.grammars.fill(first, masks, MASK_BYTES)
    while grammar.lacks_some:
        time.sleep(0.001)
    assert len(grammar.matchers) == 3
    later = {at: compiled.matcher(constraint) for at in range(5)}
    assert lexers(later) == 3
    for token in ids("ab 12"):
        assert all(matcher.accept(token) for matcher in (*first.values(), *later.values()))
    alone = memoryview(bytearray(MASK_BYTES))
    first[0].fill(alone)
    assert compiled.grammars.fill(later, masks, MASK_BYTES) == {}
    assert bytes(masks) == bytes(alone) * 5


def test_what_is_compiled_again_counts_in_the_cache() -> None:
    compiled = Compiled(num_threads=4, max_cache_bytes=5 * 2**20)
    others = [regex(text) for text in ("a+", "b+", "c+")]
    held = [compiled.matcher(constraint).grammar for constraint in others]
    rows = {at: compiled.matcher(regex("d+")) for at in range(4)}
    compiled.grammars.fill(rows, memoryview(bytearray(4 * MASK_BYTES)), MASK_BYTES)
    del held
    assert compiled.grammars.awaits(request(others[0])) is not None, "the oldest had to go"


def test_a_matcher_that_needs_too_much_work_ends_alone(compiled: Compiled) -> None:
    many = compiled.matcher(Constraint("lark", '{"grammars": [{"lark_grammar": "start: start start | \\"a\\""}]}'))
    other = compiled.matcher(regex("a+"))
    masks = memoryview(bytearray(2 * MASK_BYTES))
    (a,) = ids("a")
    for _ in range(200):
        failures = compiled.grammars.fill({0: many, 1: other}, masks, MASK_BYTES)
        if failures:
            break
        assert other.accept(a)
        try:
            many.accept(a)
        except InvalidConstraint as error:
            failures = {0: error}
            break
    assert set(failures) == {0} and isinstance(failures[0], InvalidConstraint)
    assert "too complex" in str(failures[0])
    assert a in allowed(other)


def test_a_tokenizer_without_bytes_is_no_vocabulary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **options: object) -> Callable[[], None]:
        raise ValueError("can't determine decoder type")

    monkeypatch.setattr(llguidance, "LLTokenizer", refuse)
    assert read_vocabulary(CARD) is None
    assert "cannot be constrained" in caplog.text
