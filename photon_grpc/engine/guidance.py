"""Grammars and matchers of llguidance.

Grammars are compiled in a thread beside the engine's loop (the library holds the interpreter's lock only while it reads
the text), one at a time, and kept for those who ask for the same. Matchers of one compilation share its lexer under a
lock, and in parallel would only wait for each other: a grammar that many rows obey is compiled again as more requests
ask for it, until each thread that fills masks has a lexer of it, eight at most.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from math import log2
from weakref import WeakValueDictionary

import llguidance
import numpy as np

from photon_grpc.config.model_dir import TOKENIZER_FILE, ModelConfig
from photon_grpc.core.constraint import Constraint
from photon_grpc.core.ports import Event
from photon_grpc.core.request import Request
from photon_grpc.engine.grammar import Matcher
from photon_grpc.engine.unique_keys import KeyState, KeyTokens, after
from photon_grpc.errors import InvalidConstraint

_LOG = logging.getLogger(__name__)

#: What compiled grammars may take in all, by `_estimate`.
_MAX_CACHE_BYTES = 256 * 2**20
#: Of them those compiled again; one of them counts so much of a first one (a seventh was seen).
_MAX_COPIES_SHARE, _COPY_SHARE = 4, 4
#: Lexers of one grammar: sixteen fill 64 masks no sooner, and each learns for itself.
_MAX_LEXERS = 8
#: More than the front ends' trial has: what ended there well does so here.
_STACK_BYTES = 64 * 2**20
_FIELD = "structured_output"

#: A state, and the number of the mask that it fills.
_Row = tuple[llguidance.LLMatcher, int]


class Compilation(Event):
    """One grammar, compiled or not yet. The compiling thread sets `problem`, once, or adds to `matchers`."""

    __slots__ = (
        "__weakref__",
        "_turn",
        "constraint",
        "is_kept",
        "key_tokens",
        "matchers",
        "num_rows",
        "num_wanted",
        "problem",
    )

    def __init__(self, constraint: Constraint, key_tokens: Callable[[], KeyTokens]) -> None:
        self.constraint = constraint
        #: Of the vocabulary; the first call takes long.
        self.key_tokens = key_tokens
        #: At its beginning, each with a lexer of its own; copies of them are walked.
        self.matchers: list[llguidance.LLMatcher] = []
        self.num_wanted = 1
        #: Of the last step that had some.
        self.num_rows = 0
        #: In the cache.
        self.is_kept = True
        self.problem = ""
        self._turn = 0

    @property
    def is_done(self) -> bool:
        return bool(self.matchers) or bool(self.problem)

    def next(self) -> llguidance.LLMatcher:
        """One of `matchers`, in turn."""
        self._turn += 1
        return self.matchers[self._turn % len(self.matchers)]


class GuidanceGrammars:
    """Grammars of the engine's requests.

    Args:
        tokenizer: its vocabulary is the model's.
        wake: says that a Compilation is done, from any thread (core.ports.Inbox.wake).
        num_threads: that fill masks.
        max_cache_bytes: of compiled grammars.
    """

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        wake: Callable[[Event], None],
        num_threads: int,
        max_cache_bytes: int = _MAX_CACHE_BYTES,
    ) -> None:
        self._compiler = Compiler(tokenizer, wake)
        self._tokenizer_ends = tuple(tokenizer.eos_tokens)
        self._key_tokens = cache(partial(KeyTokens, tokenizer))
        #: By the number of their threads, a power of two or all.
        self._executor = cache(llguidance.LLExecutor)
        self._num_threads = num_threads
        self._max_cache_bytes = max_cache_bytes
        #: Oldest use first.
        self._cache: OrderedDict[Constraint, Compilation] = OrderedDict()
        self._num_bytes = 0
        self._num_copy_bytes = 0
        #: Those that something holds: the cache, a request that waits for its own, a matcher.
        self._alive: WeakValueDictionary[Constraint, Compilation] = WeakValueDictionary()

    def awaits(self, request: Request) -> Event | None:
        if request.constraint is None:
            return None
        compilation = self._cache.get(request.constraint) or self._add(request.constraint)
        self._cache.move_to_end(request.constraint)
        if not compilation.is_done:
            return compilation
        self._spread(compilation)
        return None

    def matcher(self, request: Request) -> GuidanceMatcher | None:
        if request.constraint is None:
            return None
        compilation, stop = self._cache[request.constraint], request.stop
        kind = UniqueKeysMatcher if request.constraint.has_unique_keys else GuidanceMatcher
        return kind(compilation, stop.eos_token_ids + stop.stop_token_ids, self._tokenizer_ends)

    def fill(self, matchers: Mapping[int, Matcher], masks: memoryview, mask_bytes: int) -> dict[int, BaseException]:
        """As engine.grammar.Grammars; in parallel."""
        mine = {at: matcher for at, matcher in matchers.items() if isinstance(matcher, GuidanceMatcher)}
        for grammar, num_rows in Counter(matcher.grammar for matcher in mine.values()).items():
            grammar.num_rows = num_rows
        address, num_masks = _address(masks), len(masks) // mask_bytes
        threads, parts = self._parts(_by_lexer(mine))
        for part in parts:
            threads.unsafe_compute_mask_ptr(part, address, mask_bytes, num_masks)
        failures: dict[int, BaseException] = {}
        for at, matcher in mine.items():
            try:
                matcher.correct(masks[at * mask_bytes : (at + 1) * mask_bytes])
            except BaseException as error:
                failures[at] = error
        return failures

    def _parts(self, columns: Collection[list[_Row]]) -> tuple[llguidance.LLExecutor, list[list[_Row]]]:
        """Lists that are filled one after another, each by these threads: all rows at once, those of a lexer side by
        side, since a thread takes a stretch of the list and two of them seldom meet under one lock then. More threads
        than the longest of the lexers' rows leave room for would wait for each other: the nearest power of two. Where
        there is nothing to share out, rows by themselves, which are filled in the thread that asks."""
        rows = [row for column in columns for row in column]
        num_parallel = 1 << round(log2(len(rows) / max(map(len, columns)))) if rows else 1
        if min(num_parallel, self._num_threads) == 1:
            return self._executor(1), [[row] for row in rows]
        return self._executor(min(num_parallel, self._num_threads)), [rows]

    def _spread(self, grammar: Compilation) -> None:
        """Have a grammar with fewer lexers than rows compiled once more, for requests that come later."""
        is_waiting = grammar.num_wanted > len(grammar.matchers)
        if is_waiting or grammar.num_wanted >= min(grammar.num_rows, self._num_threads, _MAX_LEXERS):
            return
        num_bytes = self._num_copy_bytes + _copy_estimate(grammar.constraint)
        if num_bytes <= self._max_cache_bytes // _MAX_COPIES_SHARE:
            self._num_copy_bytes = num_bytes
            grammar.num_wanted += 1
            self._compiler.submit_copy(grammar)

    def _add(self, constraint: Constraint) -> Compilation:
        # Where more wait than the cache holds, each is compiled once all the same.
        compilation = self._alive.get(constraint)
        if compilation is None:
            compilation = self._alive[constraint] = Compilation(constraint, self._key_tokens)
            self._compiler.submit(compilation)
        self._count(compilation, 1)
        while self._num_bytes + self._num_copy_bytes > self._max_cache_bytes and self._cache:
            _, oldest = self._cache.popitem(last=False)
            self._count(oldest, -1)
        self._cache[constraint] = compilation
        return compilation

    def _count(self, compilation: Compilation, sign: int) -> None:
        """Of what comes into the cache, or leaves it."""
        compilation.is_kept = sign > 0
        if compilation.is_kept:
            compilation.num_wanted = max(1, len(compilation.matchers))
        self._num_bytes += sign * _estimate(compilation.constraint)
        self._num_copy_bytes += sign * (compilation.num_wanted - 1) * _copy_estimate(compilation.constraint)


class Compiler:
    """A thread that lives while there is something to compile.

    Args:
        tokenizer: grammars are compiled for.
        done: is called in the thread with every Compilation that requests wait for, when it is done.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, done: Callable[[Event], None]) -> None:
        self._tokenizer = tokenizer
        self._done = done
        self._lock = threading.Lock()
        self._awaited: deque[Compilation] = deque()
        #: To be compiled again when nothing is awaited.
        self._copies: deque[Compilation] = deque()
        self._is_running = False

    def submit(self, compilation: Compilation) -> None:
        self._submit(self._awaited, compilation)

    def submit_copy(self, compilation: Compilation) -> None:
        self._submit(self._copies, compilation)

    def _submit(self, line: deque[Compilation], compilation: Compilation) -> None:
        with self._lock:
            line.append(compilation)
            if self._is_running:
                return
            self._is_running = True
        size = threading.stack_size(_STACK_BYTES)
        try:
            # No daemon: one that the end of the interpreter meets in the library takes the process down with it.
            threading.Thread(target=self._run, name="compiler").start()
        except BaseException:
            self._is_running = False
            raise
        finally:
            threading.stack_size(size)

    def _run(self) -> None:
        while (compilation := self._next()) is not None:
            is_awaited = not compilation.is_done
            if is_awaited or compilation.is_kept:
                _compile(compilation, self._tokenizer)
            if is_awaited:
                self._done(compilation)

    def _next(self) -> Compilation | None:
        with self._lock:
            line = self._awaited or self._copies
            if not line or not threading.main_thread().is_alive():
                self._is_running = False
                return None
            return line.popleft()


class GuidanceMatcher:
    """One output's state.

    Args:
        grammar: compiled.
        ends: ids that end the output: they may be drawn where the grammar is satisfied and nowhere else.
        tokenizer_ends: ids that the library takes for ends.
    """

    __slots__ = ("beginning", "grammar", "state", "_ends", "_others")

    def __init__(self, grammar: Compilation, ends: tuple[int, ...], tokenizer_ends: tuple[int, ...]) -> None:
        if not grammar.matchers:
            raise InvalidConstraint(f"{_FIELD}: {grammar.problem}", field=_FIELD)
        self.grammar = grammar
        #: Has the lexer that `state` uses.
        self.beginning = grammar.next()
        self.state = self.beginning.deep_copy()
        self._ends = ends
        self._others = tuple(set(tokenizer_ends) - set(ends))

    def fill(self, mask: memoryview) -> None:
        self.state.unsafe_compute_mask_ptr(_address(mask), len(mask))
        self.correct(mask)

    def correct(self, mask: memoryview) -> None:
        """Makes the library's mask one of engine.grammar.Matcher.fill. Raises InvalidConstraint where it has failed."""
        self._check()
        for token_id in self._others:
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        is_satisfied = self.state.is_accepting()
        for token_id in self._ends:
            if is_satisfied:
                mask[token_id >> 3] |= 1 << (token_id & 7)
            else:
                mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF

    def accept(self, token_id: int) -> bool:
        if self.state.try_consume_tokens([token_id]) == 1:
            return True
        self._check()
        return False

    def roll_back(self, num_tokens: int) -> None:
        self.state.rollback(num_tokens)
        self._check()

    @property
    def is_complete(self) -> bool:
        return self.state.is_stopped()

    def _check(self) -> None:
        if self.state.is_error():
            words = self.state.get_error().replace("<non-verbose/>", "").strip()
            raise InvalidConstraint(f"{_FIELD}: too complex to go on: {words}", field=_FIELD)


class UniqueKeysMatcher(GuidanceMatcher):
    """One output's state, whose JSON objects have no key twice."""

    __slots__ = ("_key_tokens", "_states")

    def __init__(self, grammar: Compilation, ends: tuple[int, ...], tokenizer_ends: tuple[int, ...]) -> None:
        super().__init__(grammar, ends, tokenizer_ends)
        self._key_tokens = grammar.key_tokens
        #: At the beginning and behind every token.
        self._states = [KeyState()]

    def correct(self, mask: memoryview) -> None:
        super().correct(mask)
        self._key_tokens().forbid(self._states[-1], mask)

    def accept(self, token_id: int) -> bool:
        state = after(self._states[-1], self._key_tokens().bytes[token_id])
        if state is None or not super().accept(token_id):
            return False
        self._states.append(state)
        return True

    def roll_back(self, num_tokens: int) -> None:
        super().roll_back(num_tokens)
        del self._states[len(self._states) - num_tokens :]


def read_vocabulary(model_config: ModelConfig) -> llguidance.LLTokenizer | None:
    """The vocabulary of a model; None where it has no tokenizer, or none that gives every token its bytes. The
    interpreter's lock is held meanwhile: 1.2 to 1.5 s of CPU for 128,000 tokens on a loaded machine."""
    if not model_config.has_tokenizer:
        return None
    text = (model_config.path / TOKENIZER_FILE).read_text()
    try:
        return llguidance.LLTokenizer(
            text, n_vocab=model_config.vocab_size, eos_token=list(model_config.eos_token_ids) or None
        )
    except Exception as error:
        _LOG.warning("outputs cannot be constrained: %s is not for grammars: %s", TOKENIZER_FILE, error)
        return None


def _compile(compilation: Compilation, tokenizer: llguidance.LLTokenizer) -> None:
    try:
        constraint = compilation.constraint
        limits = llguidance.LLParserLimits(**constraint.limits)
        matcher = llguidance.LLMatcher(tokenizer, constraint.grammar, log_level=0, limits=limits)
        # The lexer, which all copies share, learns the beginning here.
        matcher.deep_copy().compute_bitmask()
        if constraint.has_unique_keys:
            compilation.key_tokens()
    except BaseException as error:  # a panic of the library is no Exception
        compilation.problem = f"cannot be compiled ({type(error).__name__})"
        return
    if matcher.is_error():
        compilation.problem = matcher.get_error()
    else:
        compilation.matchers.append(matcher)


def _by_lexer(matchers: Mapping[int, GuidanceMatcher]) -> Collection[list[_Row]]:
    """Their states and numbers, those apart that share no lexer."""
    columns: dict[int, list[_Row]] = {}
    for at, matcher in matchers.items():
        columns.setdefault(id(matcher.beginning), []).append((matcher.state, at))
    return columns.values()


def _address(mask: memoryview) -> int:
    return int(np.frombuffer(mask, np.uint8).__array_interface__["data"][0])


def _copy_estimate(constraint: Constraint) -> int:
    """Bytes that it takes compiled again."""
    return _estimate(constraint) // _COPY_SHARE


def _estimate(constraint: Constraint) -> int:
    """Bytes that a compiled grammar takes."""
    return 2**20 + 64 * len(constraint.grammar)
