"""Grammars of llguidance: compiled in a thread, kept within bounds, and masks in which only what satisfies may end."""

from __future__ import annotations

import gc
import json
import queue
import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import llguidance
import pytest
from msgspec.structs import replace as replace_struct
from tokenizers import Tokenizer as Tokenizers

from photon_grpc import demo
from photon_grpc.config.model_dir import TOKENIZER_FILE, read_model_dir
from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.batch import Batch
from photon_grpc.core.constraint import Constraint
from photon_grpc.core.ports import Event
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.constraints import preparation
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs, MatcherLost, NoGrammars
from photon_grpc.engine.constraints.guidance import GuidanceGrammars, read_vocabulary
from photon_grpc.engine.constraints.lexers import FIRST_LEXER_STATES, CompiledGrammar, Lexer, LexerCache, lexer_bytes
from photon_grpc.engine.constraints.matcher import GuidanceMatcher
from photon_grpc.engine.constraints.preparation import PrepareAfterIds, PrepareAtStart
from photon_grpc.engine.constraints.worker import Job, JobQueue, Progress, Worker
from photon_grpc.errors import FeatureNotSupported, InvalidConstraint, InvalidRequest
from photon_grpc.frontend.constraints.constraint import write_grammar
from photon_grpc.frontend.input.tokenizer import Tokenizer
from tests.frontend.small_tokenizers import definition

CARD = read_model_dir(demo.TARGET)
VOCABULARY = read_vocabulary(CARD)
TOKENIZER = Tokenizer.from_file(CARD.path / "tokenizer.json")
EOS = CARD.eos_token_ids
MASK_BYTES = CARD.vocab_size // 8


def ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def request(constraint: Constraint | None, stop: StopParams | None = None, owner: str = "") -> Request:
    stop = stop or StopParams(9, eos_token_ids=EOS)
    return Request("r", (7,), SamplingParams(), stop, 0.0, constraint=constraint, owner=owner)


def regex(text: str) -> Constraint:
    return write_grammar(ConstraintAsk("regex", text))


class Compiled:
    """Grammars, and what has woken the engine."""

    def __init__(self, num_threads: int = 1, max_bytes: int = 2**30) -> None:
        assert VOCABULARY is not None
        self.woken: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.grammars = GuidanceGrammars(VOCABULARY, self.woken.put, num_threads, max_bytes)

    def prepare(
        self, asked: Request, ids: tuple[int, ...] = (), is_anew: bool = False
    ) -> PrepareAtStart | PrepareAfterIds:
        """Once it awaits nothing."""
        prepared = self.grammars.prepare(asked, ids, is_anew)
        assert prepared is not None
        event = prepared.awaits()
        while event is not None and self.woken.get(timeout=30) is not event:
            pass  # of another one
        assert prepared.awaits() is None
        return prepared

    def matcher(self, constraint: Constraint, stop: StopParams | None = None, owner: str = "") -> GuidanceMatcher:
        (matcher,) = self.prepare(request(constraint, stop, owner)).matchers(1)
        return matcher


def allowed(matcher: GuidanceMatcher) -> set[int]:
    mask = memoryview(bytearray(MASK_BYTES))
    matcher.fill(mask)
    return bits(mask)


def bits(mask: memoryview) -> set[int]:
    return {id for id in range(CARD.vocab_size) if mask[id // 8] >> id % 8 & 1}


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return Compiled()


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> Counter[Constraint]:
    """Count compilations."""
    counts: Counter[Constraint] = Counter()
    compile_lexer = preparation.compile_lexer

    def counted(grammar: CompiledGrammar, *rest: Any) -> Lexer | str:
        counts[grammar.constraint] += 1
        return compile_lexer(grammar, *rest)

    monkeypatch.setattr(preparation, "compile_lexer", counted)
    return counts


def test_a_grammar_is_compiled_once_in_a_thread_that_wakes_the_engine(num_compiled: Counter[Constraint]) -> None:
    compiled = Compiled()
    asked, other = request(regex("a+")), request(regex("b+"))
    prepared = [compiled.grammars.prepare(each, (), False) for each in (asked, other, asked)]
    for each in prepared:
        while each is not None and each.awaits() is not None:
            compiled.woken.get(timeout=30)
    again = compiled.grammars.prepare(request(regex("a+")), (), False)
    assert again is not None and again.awaits() is None
    one, two = again.matchers(2)
    assert one is not two and one.lexer is two.lexer
    assert num_compiled == {asked.constraint: 1, other.constraint: 1}
    assert compiled.grammars.prepare(request(None), (), False) is None


def test_a_constraint_that_does_not_compile_refuses_the_request(compiled: Compiled) -> None:
    for wrong in (Constraint("regex", "no JSON"), Constraint("lark", '{"grammars": [{"lark_grammar": "start: x"}]}')):
        with pytest.raises(InvalidConstraint):
            compiled.matcher(wrong)
    with pytest.raises(FeatureNotSupported):
        NoGrammars().prepare(request(regex("a")), (), False)


ROOM = lexer_bytes(regex("a+"), FIRST_LEXER_STATES) + 2**16


def test_the_cache_evicts_the_least_recently_used(num_compiled: Counter[Constraint]) -> None:
    compiled = Compiled(max_bytes=4 * ROOM)
    first, second, third, fourth = (regex(f"{letter}+") for letter in "abcd")
    # The worker's thread may hold a job that is done, and so may a wake that has not been read.
    done = []
    for constraint in (first, second, third, first, fourth):
        done.append(compiled.prepare(request(constraint)))
        done[-1].matchers(1)
    for constraint in (third, first, fourth):
        compiled.matcher(constraint)
    assert num_compiled == dict.fromkeys((first, second, third, fourth), 1)
    compiled.matcher(second)
    assert num_compiled[second] == 2


def test_outputs_wait_for_memory_of_lexers_and_each_grammar_is_compiled_once(
    num_compiled: Counter[Constraint],
) -> None:
    compiled = Compiled(max_bytes=2 * ROOM)
    asked = [request(regex(f"{letter}+"), owner=letter) for letter in "abcdef"]
    waiting = {prepared: None for each in asked if (prepared := compiled.grammars.prepare(each, (), False))}
    held: deque[GuidanceMatcher] = deque()
    while waiting:
        event = compiled.woken.get(timeout=30)
        assert compiled.grammars.cache.num_bytes() <= 2 * ROOM
        held += event.matchers(1)  # type: ignore[attr-defined]
        del waiting[event], event  # type: ignore[arg-type]
        if len(held) == 2:
            held.popleft()
    assert set(num_compiled.values()) == {1} and len(num_compiled) == 6


@pytest.mark.parametrize("end", [EOS, (300,), (*EOS, 300)])
def test_an_output_may_end_only_when_it_satisfies_the_grammar(compiled: Compiled, end: tuple[int, ...]) -> None:
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


def test_text_without_a_choice_is_forced_up_to_where_there_is_one(compiled: Compiled) -> None:
    matcher = compiled.matcher(regex('"customer_name":(1|2)x'))
    forced = matcher.forced()
    # The last bytes before a choice may be spelled together with it.
    assert TOKENIZER.decode(forced).startswith('"customer_name') and not {*ids("1"), *ids("2")} & set(forced)
    beginning = allowed(matcher)
    assert all(matcher.accept(token) for token in forced)
    matcher.roll_back(len(forced))
    assert allowed(matcher) == beginning and matcher.forced() == forced
    assert matcher.advance(forced[0]) and matcher.forced() == forced[1:]
    free = compiled.matcher(regex("(a|b)c"))
    assert free.forced() == ()
    assert free.advance(ids("a")[0]) and free.forced() in ((), tuple(ids("c")))


def test_tokens_taken_as_a_whole_are_those_that_are_walked_one_by_one(compiled: Compiled) -> None:
    schema = {"type": "array", "items": {"type": "string", "maxLength": 34}}
    constraint = write_grammar(ConstraintAsk("json_schema", json.dumps(schema)))
    text = (CARD.path / TOKENIZER_FILE).read_text()
    one_by_one = llguidance.LLTokenizer(text, n_vocab=CARD.vocab_size, eos_token=list(EOS), slices=[])
    walked = llguidance.LLMatcher(one_by_one, constraint.grammar, log_level=0)
    matcher, lengths = compiled.matcher(constraint), set()
    for letter in ('["', *"a string of thirty-four characters", '",', '"', *"and more"):
        for token in ids(letter):
            assert matcher.advance(token) and walked.consume_token(token)
        may_follow = allowed(matcher)
        assert may_follow == bits(memoryview(walked.compute_bitmask()))
        lengths.add(max((len(TOKENIZER.decode([id])) for id in may_follow), default=0))
    assert len(lengths) > 3, "the end of a string forbids long tokens, one after another"


@pytest.mark.parametrize("drawn", ["class", "x"])
def test_an_id_that_may_not_follow_ends_the_matcher(compiled: Compiled, drawn: str) -> None:
    matcher = compiled.matcher(regex("def x"))
    assert matcher.advance(ids("def x")[0])
    assert not matcher.advance(ids(drawn)[0])
    with pytest.raises(InvalidConstraint):
        allowed(matcher)


def test_masks_filled_together_equal_masks_filled_one_by_one() -> None:
    compiled = Compiled(num_threads=2)
    constraints = [regex("a+"), regex("[0-9]{3}"), write_grammar(ConstraintAsk("json_object")), regex("a+")]
    matchers = {2 * at: compiled.matcher(constraint) for at, constraint in enumerate(constraints)}
    matchers[0].accept(ids("a")[0])
    masks = memoryview(bytearray(b"\xff" * (8 * MASK_BYTES)))
    assert compiled.grammars.filler(matchers, MASK_BYTES).fill(masks) == {}
    for at, matcher in matchers.items():
        alone = memoryview(bytearray(MASK_BYTES))
        matcher.fill(alone)
        assert masks[at * MASK_BYTES : (at + 1) * MASK_BYTES] == alone
        assert bytes(masks[(at + 1) * MASK_BYTES : (at + 2) * MASK_BYTES]) == b"\xff" * MASK_BYTES


def every_kind() -> list[Constraint]:
    """Those that may end here and there, that name the vocabulary's end, and with forced text."""
    named = f"start: /[a-z]+/ <[{EOS[0]}]> /[a-z]+/"
    schema = {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1}
    return [
        *map(regex, ("(ab)*", ".{0,9}", "[0-9]+(,[0-9]+)*", "(forced text)+")),
        Constraint("lark", json.dumps({"grammars": [{"lark_grammar": named}]})),
        write_grammar(ConstraintAsk("json_schema", json.dumps(schema))),
        write_grammar(ConstraintAsk("json_object")),
    ]


#: 300 stands for text.
@pytest.mark.parametrize("end", [EOS, EOS[:1], (300,), (*EOS, 300), ()])
def test_masks_of_steps_equal_those_of_single_matchers(end: tuple[int, ...]) -> None:
    compiled, stop, draw = Compiled(num_threads=2), StopParams(9, stop_token_ids=end), random.Random(7)
    constraints = every_kind()
    matchers, others = ({at: compiled.matcher(one, stop) for at, one in enumerate(constraints)} for _ in range(2))
    filler, masks = compiled.grammars.filler(matchers, MASK_BYTES), memoryview(bytearray(len(matchers) * MASK_BYTES))
    num_ended = 0
    for _ in range(20):
        assert filler.fill(masks) == {}
        for at, other in others.items():
            may_follow = allowed(other)
            assert bits(masks[at * MASK_BYTES : (at + 1) * MASK_BYTES]) == may_follow
            assert may_follow & {*EOS, *end} in (set(), set(end))
            num_ended += bool(may_follow & set(end))
            if text := sorted(may_follow - set(end)):
                token = draw.choice(text)
                assert other.accept(token) and matchers[at].advance(token)
                assert matchers[at].is_complete == other.is_complete
    assert num_ended or not end


def lexers(matchers: dict[int, GuidanceMatcher]) -> int:
    return len({matcher.lexer for matcher in matchers.values()})


def users(*groups: dict[int, GuidanceMatcher]) -> list[int]:
    """Of each lexer, the fewest first."""
    return sorted(Counter(matcher.lexer for group in groups for matcher in group.values()).values())


def asked_again(compiled: Compiled, constraint: Constraint, num_rows: int) -> list[GuidanceMatcher]:
    """Matchers of requests that come after a step of so many rows, one after another."""
    masks = memoryview(bytearray(num_rows * MASK_BYTES))
    compiled.grammars.filler({at: compiled.matcher(constraint) for at in range(num_rows)}, MASK_BYTES).fill(masks)
    matchers = []
    for _ in range(2 * num_rows):
        matchers.append(compiled.matcher(constraint))
        grammar = matchers[-1].grammar
        while grammar.num_wanted > len(grammar.lexers):
            time.sleep(0.001)
    return matchers


def test_rows_of_one_grammar_get_lexers_of_their_own_as_many_as_threads() -> None:
    compiled = Compiled(num_threads=3)
    constraint, masks = regex("[a-z]+ [0-9]{3}"), memoryview(bytearray(6 * MASK_BYTES))
    first = {at: compiled.matcher(constraint) for at in range(6)}
    assert lexers(first) == 1, "no step has shown yet that more are of use"
    compiled.grammars.filler(first, MASK_BYTES).fill(masks)
    assert len(first[0].grammar.lexers) == 1, "no request has come again"
    asked_again(compiled, constraint, 6)
    # The first six have one lexer: those that come later take the others until these have as many.
    later = {at: compiled.matcher(constraint) for at in range(14)}
    assert users(first, later) == [6, 7, 7]
    few = {at: matcher for at, matcher in later.items() if at % 7 < 3}
    assert lexers(few) > 1
    for token in ids("ab 12"):
        assert all(matcher.accept(token) for matcher in (*first.values(), *few.values()))
    alone = memoryview(bytearray(MASK_BYTES))
    first[0].fill(alone)
    few = dict(enumerate(few.values()))
    assert compiled.grammars.filler(few, MASK_BYTES).fill(masks) == {}
    assert bytes(masks) == bytes(alone) * 6


def test_rows_stay_shared_out_over_lexers_as_outputs_end_and_begin() -> None:
    compiled, constraint = Compiled(num_threads=3), regex("[a-z]+")
    asked_again(compiled, constraint, 6)
    alive = {at: compiled.matcher(constraint) for at in range(9)}
    draw = random.Random(3)
    for _ in range(40):
        ended = draw.sample(sorted(alive), 4)
        for at in ended:
            del alive[at]
        for at in ended:
            alive[at] = compiled.matcher(constraint)
        assert users(alive) == [3, 3, 3]


def test_a_single_row_at_a_time_needs_one_lexer() -> None:
    compiled = Compiled(num_threads=3)
    assert len({matcher.lexer for matcher in asked_again(compiled, regex("a+"), 1)}) == 1


def test_further_lexers_take_a_quarter_of_the_memory_and_evict_nothing(
    num_compiled: Counter[Constraint],
) -> None:
    compiled = Compiled(num_threads=16, max_bytes=24 * ROOM)
    others = [regex(text) for text in ("a+", "b+", "c+")]
    for constraint in others:
        compiled.matcher(constraint)
    hot = asked_again(compiled, regex("d+"), 16)[-1].grammar
    assert len(hot.lexers) == 3
    hotter = asked_again(compiled, regex("e+"), 16)[-1].grammar
    assert len(hotter.lexers) == 1, "there is no room for more"
    for constraint in others:
        compiled.matcher(constraint)
    assert all(num_compiled[constraint] == 1 for constraint in others)


def test_what_a_request_waits_for_is_compiled_before_further_lexers(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled(num_threads=3)
    hot = [compiled.matcher(regex(text)) for text in ("a+", "b+", "c+")]
    order: list[Constraint] = []
    gate, compile_lexer = threading.Event(), preparation.compile_lexer

    def gated(grammar: CompiledGrammar, *rest: Any) -> Lexer | str:
        gate.wait(30)
        order.append(grammar.constraint)
        return compile_lexer(grammar, *rest)

    monkeypatch.setattr(preparation, "compile_lexer", gated)
    for matcher in hot:
        matcher.grammar.num_rows = 3
        prepared = compiled.grammars.prepare(request(matcher.grammar.constraint), (), False)
        assert prepared is not None and prepared.awaits() is None
    new = request(regex("d+"))
    prepared = compiled.grammars.prepare(new, (), False)
    gate.set()
    while compiled.woken.get(timeout=30) is not prepared:
        pass
    # One of the others was begun when it came.
    assert new.constraint in order[:2]


def test_a_matcher_that_needs_too_much_work_ends_alone(compiled: Compiled) -> None:
    many = compiled.matcher(Constraint("lark", '{"grammars": [{"lark_grammar": "start: start start | \\"a\\""}]}'))
    other = compiled.matcher(regex("a+"))
    masks = memoryview(bytearray(2 * MASK_BYTES))
    filler = compiled.grammars.filler({0: many, 1: other}, MASK_BYTES)
    (a,) = ids("a")
    for _ in range(200):
        failures = filler.fill(masks)
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


def test_a_matcher_that_failed_at_its_mask_is_released_with_its_output() -> None:
    compiled = Compiled()
    outputs = ConstrainedOutputs(compiled.grammars, CARD.vocab_size)
    seq = Sequence(request(regex("[a-z]+")), 0, 0, 0, (0.0, 0))
    event = outputs.begin([seq])
    while event is not None and compiled.woken.get(timeout=30) is event:
        event = outputs.begin([seq])
    matcher = weakref.ref(outputs.matchers[seq])
    # What may not follow leaves the library's state failed.
    outputs.matchers[seq].state.consume_token(ids("!")[0])
    gc.collect()
    gc.disable()
    try:
        _, failures = outputs.masks(Batch(1, (1,), (1,), (1,), masked=(0,)), [seq], ())
        outputs.forget(seq)
        assert isinstance(failures[seq], InvalidConstraint) and matcher() is None
    finally:
        gc.enable()


def test_a_panic_of_the_library_ends_its_output_and_not_those_that_ask_later() -> None:
    """It leaves the lexer locked for good."""
    compiled = Compiled()
    constraint = write_grammar(ConstraintAsk("grammar", 'start: "b" "o"{3} "k" | "z" t "q"\nt[stop="xyz"]: /a*/'))
    panicking, draw = compiled.matcher(constraint), random.Random(0)
    assert panicking.accept(*ids("z"))
    with pytest.raises(InvalidConstraint) as caught:
        for _ in range(40):
            panicking.accept(draw.choice(sorted(allowed(panicking) - {*EOS})))
    assert "panic" in str(caught.value) and "backtrace" not in str(caught.value)
    later = compiled.matcher(constraint)
    assert later.accept(*ids("b")) and allowed(later)


def test_a_tokenizer_without_bytes_is_no_vocabulary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **options: object) -> Callable[[], None]:
        raise ValueError("can't determine decoder type")

    monkeypatch.setattr(llguidance, "LLTokenizer", refuse)
    assert read_vocabulary(CARD) is None
    assert "cannot be constrained" in caplog.text


def test_without_an_end_id_no_text_is_mistaken_for_one(tmp_path: Path) -> None:
    tokenizer = Tokenizers.from_str(definition("byte_level"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    endless = replace(CARD, path=tmp_path, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=())
    vocabulary = read_vocabulary(endless)
    assert vocabulary is not None
    assert vocabulary.eos_tokens == [tokenizer.token_to_id("<|begin_of_text|>")]


#: Its lexer learns a state for nearly every text: two outputs of 80 tokens fill one that may learn 20,000.
FORGETFUL = regex("(?s:.*)[a-m](?s:.){14}q(?s:.*)")


class Outputs:
    """Outputs of an engine's loop, driven by hand: ids are drawn from masks by a generator of their own."""

    def __init__(self, compiled: Compiled, constraint: Constraint, num_tokens: int) -> None:
        self.constrained = ConstrainedOutputs(compiled.grammars, CARD.vocab_size)
        self._woken = compiled.woken
        self._constraint = constraint
        self._num_tokens = num_tokens
        self._draws: dict[Sequence, random.Random] = {}
        #: Of those that go on, what has been drawn.
        self.texts: dict[Sequence, list[int]] = {}
        self.ends: dict[int, list[int] | str] = {}
        self._awaiting: set[Sequence] = set()

    def add(self, seed: int, owner: str = "") -> None:
        asked = request(self._constraint, StopParams(self._num_tokens, eos_token_ids=EOS), owner)
        seq = Sequence(asked, seed, 0, 0, (0.0, seed))
        self.texts[seq] = []
        self._draws[seq] = random.Random(seed)
        self._settle(seq, self.constrained.begin)

    def _settle(self, seq: Sequence, begin: Callable[[Any], Event | None]) -> None:
        try:
            while (event := begin(seq if begin == self.constrained.begin_anew else [seq])) is not None:
                while self._woken.get(timeout=60) is not event:
                    pass
        except InvalidConstraint as error:
            self.ends[seq.handle] = error.message
            del self.texts[seq]

    def step(self) -> None:
        """Fill a mask and advance by an id for every output."""
        rows = list(self.texts)
        ones = (1,) * len(rows)
        batch = Batch(1, ones, ones, ones, masked=tuple(range(len(rows))))
        masks, failures = self.constrained.masks(batch, rows, ())
        drawn = {}
        for at, seq in enumerate(rows):
            if seq not in failures:
                drawn[seq] = self._draws[seq].choice(sorted(bits(masks[at * MASK_BYTES : (at + 1) * MASK_BYTES])))
        for seq, failure in failures.items():
            if isinstance(failure, MatcherLost):
                self._settle(seq, self.constrained.begin_anew)
            else:
                self.ends[seq.handle] = str(failure)
                del self.texts[seq]
        for seq, token in drawn.items():
            self._draw(seq, token)

    def _draw(self, seq: Sequence, token: int) -> None:
        seq.ids.append(token)
        self.texts[seq].append(token)
        is_complete = token in EOS
        try:
            is_complete = is_complete or self.constrained.advance(seq, token)
        except MatcherLost:
            self._settle(seq, self.constrained.begin_anew)
        if seq in self.texts and (is_complete or len(self.texts[seq]) == self._num_tokens):
            self.ends[seq.handle] = self.texts.pop(seq)
            self.constrained.forget(seq)


def written(matcher: GuidanceMatcher, num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Ids drawn one by one from what the matcher allows."""
    draw, drawn = random.Random(seed), []
    while len(drawn) < num_tokens and (choice := sorted(allowed(matcher) - {*EOS})):
        drawn.append(draw.choice(choice))
        assert matcher.advance(drawn[-1])
    return tuple(drawn)


def continued(constraint: Constraint, ids: tuple[int, ...], owner: str = "") -> Request:
    return replace_struct(request(constraint, owner=owner), continued_ids=ids)


OBJECTS = write_grammar(
    ConstraintAsk("json_schema", '{"type": "array", "minItems": 9, "items": {"type": "object", "minProperties": 2}}')
)


@pytest.mark.parametrize("constraint", [OBJECTS, regex("[a-z]+ [0-9]{3,9}")], ids=["schema", "regex"])
def test_a_matcher_made_after_ids_equals_the_one_that_sampled_them(compiled: Compiled, constraint: Constraint) -> None:
    whole = written(compiled.matcher(constraint), 40)
    for cut in (1, 7, len(whole)):
        drawing = compiled.matcher(constraint)
        assert all(map(drawing.advance, whole[:cut]))
        (walked,) = compiled.prepare(continued(constraint, whole[:cut]), whole[:cut]).matchers(1)
        assert allowed(walked) == allowed(drawing) and walked.lexer is not drawing.lexer


def test_ids_that_may_not_follow_are_named(compiled: Compiled) -> None:
    asked = continued(regex("def x"), (*ids("def"), *ids("y")))
    with pytest.raises(InvalidRequest) as caught:
        compiled.prepare(asked, asked.continued_ids).matchers(1)
    assert caught.value.field == f"continue_from.ids[{len(ids('def'))}]"


def test_a_walk_runs_in_pieces_and_is_bounded() -> None:
    compiled = Compiled()
    assert VOCABULARY is not None
    times, seconds = count(), count()
    shop = preparation.JobContext(
        VOCABULARY, compiled.grammars.cache, lambda: float(next(times)), lambda: float(next(seconds))
    )
    long = regex("[a-z ]{900}")
    whole = written(compiled.matcher(long), 60)
    walk = PrepareAfterIds(shop, compiled.grammars.cache.grammar("", long), continued(long, whole), whole, False)
    num_pieces = 0
    with pytest.raises(InvalidConstraint) as caught:
        while walk.work() is Progress.MORE:
            num_pieces += 1
    assert num_pieces == preparation.MAX_WALK_S, "an id and a second of computing each"
    assert (caught.value.limit, caught.value.needed) == (num_pieces + 1, 60)
    # Others made it necessary: it takes as long as it takes.
    anew = PrepareAfterIds(shop, compiled.grammars.cache.grammar("", long), request(long), whole, True)
    while anew.work() is Progress.MORE:
        pass
    assert len(anew.matchers(1)) == 1


def test_jobs_take_turns_by_owner_and_what_is_cancelled_is_not_done() -> None:
    order: list[str] = []

    class Piece(Job):
        __slots__ = ("left", "name")

        def __init__(self, owner: str, name: str, left: int) -> None:
            super().__init__(owner)
            self.name, self.left = name, left

        def work(self) -> Progress:
            order.append(self.name)
            self.left -= 1
            return Progress.MORE if self.left else Progress.DONE

    jobs = JobQueue()
    for job in (
        Piece("a", "a0", 3),
        Piece("a", "a1", 1),
        Piece("a", "a2", 1),
        Piece("a", "a3", 2),
        Piece("b", "b0", 1),
    ):
        jobs.push(job)
    while jobs:
        job = jobs.pop()
        if job.work() is Progress.MORE:
            jobs.put_back(job)
    assert order == ["a0", "b0", "a1", "a2", "a3", "a0", "a0", "a3"], "what was begun first is done first"
    done: queue.SimpleQueue[Event] = queue.SimpleQueue()
    cancelled, other = Piece("a", "cancelled", 1), Piece("b", "other", 1)
    cancelled.is_cancelled = True
    worker = Worker(done.put)
    worker.submit(cancelled)
    worker.submit(other)
    assert done.get(timeout=30) is other and order[-1] == "other" and done.empty()


def alone(constraint: Constraint, num_tokens: int, seed: int) -> list[int] | str:
    outputs = Outputs(Compiled(), constraint, num_tokens)
    outputs.add(seed)
    while outputs.texts:
        outputs.step()
    return outputs.ends[seed]


def test_what_lexers_learned_from_other_outputs_does_not_change_an_output() -> None:
    compiled = Compiled(num_threads=2)
    outputs = Outputs(compiled, FORGETFUL, 50)
    order = random.Random(5)
    left = list(range(10))
    while left or outputs.texts:
        for _ in range(order.randrange(4)):
            if left:
                seed = left.pop()
                outputs.add(seed, owner=("alice", "bob")[seed % 2])
        if outputs.texts:
            outputs.step()
    assert outputs.ends == {seed: alone(FORGETFUL, 50, seed) for seed in range(10)}
    assert any(isinstance(end, list) and len(end) == 50 for end in outputs.ends.values())


def test_the_loop_neither_compiles_nor_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def noting(called: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            threads.add(threading.get_ident())
            return called(*arguments)

        return call

    compiled, long = Compiled(), regex("[a-z ]{9000}")
    whole = written(compiled.matcher(long), 200)
    monkeypatch.setattr(preparation, "compile_lexer", noting(preparation.compile_lexer))
    monkeypatch.setattr(GuidanceMatcher, "follow", noting(GuidanceMatcher.follow))
    compiled.matcher(regex("b+"))
    compiled.prepare(continued(long, whole), whole).matchers(1)
    compiled.prepare(continued(long, whole), whole, is_anew=True).matchers(1)
    assert threads and threading.get_ident() not in threads


def test_a_lexer_that_fails_within_a_token_loses_its_matchers_and_refuses_no_id() -> None:
    """The library says then that the token does not obey the grammar."""
    draw, num_lost = random.Random(4), 0
    assert VOCABULARY is not None
    words = [token for token in range(VOCABULARY.vocab_size) if VOCABULARY.decode_bytes([token]).isalpha()]
    for max_states in range(40, 1_000, 31):
        grammar = CompiledGrammar("", FORGETFUL)
        lexer = preparation.compile_lexer(grammar, VOCABULARY, max_states)
        if isinstance(lexer, str):
            continue
        matcher = GuidanceMatcher(grammar, lexer, preparation.EndIds(EOS, EOS))
        try:
            for token in draw.choices(words, k=200):
                assert matcher.advance(token)
        except MatcherLost:
            num_lost += 1
    assert num_lost > 10


class Wanting(Job):
    """Wants a lexer of a grammar, as a job of the worker's thread."""

    __slots__ = ()

    def work(self) -> Progress:
        return Progress.DONE


def room(num: float) -> tuple[LexerCache, Callable[[str], Lexer]]:
    """Memory for so many lexers, and what takes a part of it."""
    cache = LexerCache(int(num * ROOM))
    assert VOCABULARY is not None

    def take(owner: str) -> Lexer:
        grammar = CompiledGrammar(owner, regex("a+"))
        lexer = preparation.compile_lexer(grammar, VOCABULARY, FIRST_LEXER_STATES)
        assert isinstance(lexer, Lexer)
        cache.added(lexer)
        lexer.users.add(lexer)
        return lexer

    return cache, take


def test_memory_that_is_free_goes_to_the_owner_with_least_who_may_have_more() -> None:
    cache, take = room(4.2)
    held = [take("mallory") for _ in range(3)]
    assert not cache.has_room(Wanting("mallory"), ROOM), "she has her share"
    assert cache.has_room(Wanting("alice"), ROOM)
    held.append(take("alice"))
    waiting = Wanting("bob")
    assert not cache.has_room(waiting, ROOM) and not cache.has_room(Wanting("alice"), ROOM)
    held.pop(0)
    assert not cache.has_room(Wanting("alice"), ROOM), "bob has less"
    assert cache.has_room(waiting, ROOM)


def test_a_job_that_is_done_or_cancelled_keeps_no_place() -> None:
    cache, take = room(1.2)
    held = [take("alice")]
    compiled_by_another, cancelled = Wanting("bob"), Wanting("bob")
    for job in (compiled_by_another, cancelled):
        assert not cache.has_room(job, ROOM)
    cache.leave(compiled_by_another)
    cancelled.is_cancelled = True
    held.clear()
    assert cache.has_room(Wanting("carol"), ROOM)


def test_two_requests_of_one_grammar_that_both_waited_for_memory_leave_it_to_others() -> None:
    compiled = Compiled(max_bytes=2 * ROOM)
    held = [compiled.matcher(regex("a+"), owner=owner) for owner in ("alice", "dave")]
    both = [compiled.grammars.prepare(request(regex("c+"), owner="bob"), (), False) for _ in range(2)]
    time.sleep(0.1)
    held.clear()
    for each in both:
        assert each is not None
        while each.awaits() is not None:
            compiled.woken.get(timeout=30)
        each.matchers(1)
    both.clear()
    assert compiled.matcher(regex("d+"), owner="carol") is not None


def test_a_job_that_found_no_room_looks_again_while_others_go_on() -> None:
    done: queue.SimpleQueue[Event] = queue.SimpleQueue()
    is_over = threading.Event()

    class GoesOn(Job):
        __slots__ = ()

        def work(self) -> Progress:
            return Progress.DONE if is_over.is_set() else Progress.MORE

    class FindsRoomLater(Job):
        __slots__ = ("looks",)

        def work(self) -> Progress:
            self.looks = getattr(self, "looks", 0) + 1
            return Progress.DONE if self.looks > 2 else Progress.NO_ROOM

    worker, later = Worker(done.put), FindsRoomLater("bob")
    worker.submit(GoesOn("alice"))
    worker.submit(later)
    try:
        assert done.get(timeout=30) is later
    finally:
        is_over.set()


def test_a_job_that_raises_ends_with_its_error_and_the_thread_goes_on() -> None:
    done: queue.SimpleQueue[Event] = queue.SimpleQueue()

    class Raises(Job):
        __slots__ = ()

        def work(self) -> Progress:
            raise BaseException("a panic")

    worker, raises, other = Worker(done.put), Raises("a"), Wanting("b")
    worker.submit(raises)
    worker.submit(other)
    assert {done.get(timeout=30), done.get(timeout=30)} == {raises, other}
    assert str(raises.error) == "a panic" and other.error is None


def test_constraints_of_continuations_are_not_kept_and_others_end() -> None:
    compiled = Compiled()
    for number in range(40):
        asked = continued(regex(f"a{{{number},99}}"), ids("aaaa"))
        prepared = compiled.grammars.prepare(asked, asked.continued_ids, False)
        assert prepared is not None
        prepared.cancel()
    assert len(compiled.grammars.cache) == 0
    for number in range(2_000):
        compiled.grammars.cache.grammar("", regex(f"b{{{number}}}"))
    assert len(compiled.grammars.cache) <= 1_024
