"""Grammars and matchers of llguidance.

Grammars are compiled in a thread (engine/compiler.py) and kept for those who ask for the same. Matchers of one
compilation share its lexer under a lock, and in parallel would only wait for each other: a grammar that many rows obey
is compiled again as more requests ask for it, until each thread that fills masks has a lexer of it, eight at most.
"""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from math import log2
from typing import cast
from weakref import WeakValueDictionary

import llguidance

from photon_grpc.config.model_dir import TOKENIZER_FILE, ModelConfig
from photon_grpc.core.constraint import Constraint, told
from photon_grpc.core.ports import Event
from photon_grpc.core.request import Request
from photon_grpc.engine.compiler import Compilation, Compiler
from photon_grpc.engine.ends import Ends
from photon_grpc.engine.grammar import Matcher
from photon_grpc.engine.special_tokens import rename_special_tokens
from photon_grpc.engine.unique_keys import KeyState, KeyTokens, after
from photon_grpc.errors import InvalidConstraint

_LOG = logging.getLogger(__name__)

#: What compiled grammars may take in all, by `_estimate`.
_MAX_CACHE_BYTES = 256 * 2**20
#: Of them those compiled again; one of them counts so much of a first one (a seventh was seen).
_MAX_COPIES_SHARE, _COPY_SHARE = 4, 4
#: Lexers of one grammar: sixteen fill 64 masks no sooner, and each learns for itself.
_MAX_LEXERS = 8
#: Tokens that a mask takes as a whole where all of them may follow: white space, and text within a JSON string of up to
#: so many characters. The library walks the others one by one; its own steps, 10 and 30, leave it more to walk near the
#: end of a string that has one.
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{most}}}" for most in (6, 10, 16, 30)), f"{_TEXT}+"]
#: In its words when a matcher has panicked, and when one does that shares its lexer.
_PANICS = ("panic", "PoisonError")
#: In the library's words for an id that may not follow.
_REFUSED = "doesn't satisfy the grammar"

#: A state, and the number of the mask that it fills.
_Row = tuple[llguidance.LLMatcher, int]


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
        compilation = self._cache.get(request.constraint)
        if compilation is not None and compilation.is_broken:
            self._count(self._cache.pop(request.constraint), -1)
            compilation = None
        compilation = compilation or self._add(request.constraint)
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
        return kind(compilation, Ends(stop.eos_token_ids + stop.stop_token_ids, self._tokenizer_ends))

    def filler(self, matchers: Mapping[int, Matcher], mask_bytes: int) -> ParallelFiller:
        """As engine.grammar.Grammars."""
        mine = cast(Mapping[int, GuidanceMatcher], matchers)
        columns = _by_lexer(mine)
        num_rows: defaultdict[Compilation, int] = defaultdict(int)
        for column in columns:
            num_rows[mine[column[0][1]].grammar] += len(column)
        for grammar, num in num_rows.items():
            grammar.num_rows = num
        return ParallelFiller(mine, mask_bytes, *self._parts(columns))

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
        if compilation is None or compilation.is_broken:
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


class ParallelFiller:
    """Fills masks of the same matchers, in parallel.

    Args:
        matchers: by the numbers of their masks.
        mask_bytes: of one mask.
        threads: fill them.
        parts: all rows, in lists that are filled one after another.
    """

    def __init__(
        self,
        matchers: Mapping[int, GuidanceMatcher],
        mask_bytes: int,
        threads: llguidance.LLExecutor,
        parts: list[list[_Row]],
    ) -> None:
        self._matchers = matchers
        self._mask_bytes = mask_bytes
        self._threads = threads
        self._parts = parts
        #: Masks that are always corrected; of the others the bytes and bits that say whether they must be. Their states
        #: know, too, but asking each costs more: other threads have just written there.
        self._corrected = [at for at, matcher in matchers.items() if not matcher.signs]
        self._signs = [
            (at, at * mask_bytes + byte, bits) for at, matcher in matchers.items() for byte, bits in matcher.signs
        ]

    def fill(self, masks: memoryview) -> dict[int, BaseException]:
        """As engine.grammar.MaskFiller."""
        size = self._mask_bytes
        address, num_masks = _address(masks), len(masks) // size
        for part in self._parts:
            self._threads.unsafe_compute_mask_ptr(part, address, size, num_masks)
        failures: dict[int, BaseException] = {}
        for at in {*self._corrected, *[at for at, byte, bits in self._signs if masks[byte] & bits]}:
            try:
                self._matchers[at].correct(masks[at * size : (at + 1) * size])
            except BaseException as error:
                failures[at] = error
        return failures


class GuidanceMatcher:
    """One output's state.

    Args:
        grammar: compiled.
        ends: of the output.
    """

    __slots__ = ("__weakref__", "beginning", "grammar", "signs", "state", "_ends")

    def __init__(self, grammar: Compilation, ends: Ends) -> None:
        if not grammar.matchers:
            field = grammar.constraint.field
            raise InvalidConstraint(f"{field}: {grammar.problem}", field=field)
        self.grammar = grammar
        #: Has the lexer that `state` uses.
        self.beginning = grammar.lend(self)
        self.state = self.beginning.deep_copy()
        self._ends = ends
        #: Bytes of the library's mask, and bits: where none is set `correct` has nothing to do. Empty: it always has.
        self.signs = ends.signs

    def fill(self, mask: memoryview) -> None:
        self.state.unsafe_compute_mask_ptr(_address(mask), len(mask))
        self.correct(mask)

    def correct(self, mask: memoryview) -> None:
        """Makes the library's mask one of engine.grammar.Matcher.fill. Raises InvalidConstraint where it has failed."""
        is_satisfied = self.state.is_accepting()
        if not is_satisfied:
            self._check()
        self._ends.correct(mask, is_satisfied)

    def accept(self, token_id: int) -> bool:
        if self.state.try_consume_tokens([token_id]) == 1:
            return True
        self._check()
        return False

    def advance(self, token_id: int) -> bool:
        # As `accept`, but tries nothing first, which takes as long again.
        if self.state.consume_token(token_id):
            return True
        if _REFUSED not in self.state.get_error():
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
            words, field = told(self.state.get_error()), self.grammar.constraint.field
            self.grammar.is_broken |= any(panic in words for panic in _PANICS)
            raise InvalidConstraint(f"{field}: too complex to go on: {words}", field=field)


class UniqueKeysMatcher(GuidanceMatcher):
    """One output's state, whose JSON objects have no key twice."""

    __slots__ = ("_key_tokens", "_states")

    def __init__(self, grammar: Compilation, ends: Ends) -> None:
        super().__init__(grammar, ends)
        self.signs = ()
        self._key_tokens = grammar.key_tokens
        #: At the beginning and behind every token.
        self._states = [KeyState()]

    def correct(self, mask: memoryview) -> None:
        super().correct(mask)
        self._key_tokens().forbid(self._states[-1], mask)

    def accept(self, token_id: int) -> bool:
        return self._move(token_id, super().accept)

    def advance(self, token_id: int) -> bool:
        return self._move(token_id, super().advance)

    def _move(self, token_id: int, move: Callable[[int], bool]) -> bool:
        state = after(self._states[-1], self._key_tokens().bytes[token_id])
        if state is None or not move(token_id):
            return False
        self._states.append(state)
        return True

    def roll_back(self, num_tokens: int) -> None:
        super().roll_back(num_tokens)
        del self._states[len(self._states) - num_tokens :]


def read_vocabulary(model_config: ModelConfig) -> llguidance.LLTokenizer | None:
    """The vocabulary of a model; None where it has no tokenizer, or none that gives every token its bytes. The
    interpreter's lock is held meanwhile: 1.3 to 1.7 s of CPU for 128,000 tokens on a loaded machine."""
    if not model_config.has_tokenizer:
        return None
    try:
        text, special_ids = rename_special_tokens((model_config.path / TOKENIZER_FILE).read_bytes())
        # A model without an end is given one that is no text: otherwise the library takes id 0.
        ends = list(model_config.eos_token_ids) or special_ids[:1] or None
        return llguidance.LLTokenizer(text, n_vocab=model_config.vocab_size, eos_token=ends, slices=_SLICES)
    except Exception as error:
        _LOG.warning("outputs cannot be constrained: %s is not for grammars: %s", TOKENIZER_FILE, error)
        return None


def _by_lexer(matchers: Mapping[int, GuidanceMatcher]) -> Collection[list[_Row]]:
    """Their states and numbers, those apart that share no lexer."""
    columns: defaultdict[llguidance.LLMatcher, list[_Row]] = defaultdict(list)
    for at, matcher in matchers.items():
        columns[matcher.beginning].append((matcher.state, at))
    return columns.values()


def _address(mask: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mask))


def _copy_estimate(constraint: Constraint) -> int:
    """Bytes that it takes compiled again."""
    return _estimate(constraint) // _COPY_SHARE


def _estimate(constraint: Constraint) -> int:
    """Bytes that a compiled grammar takes."""
    return 2**20 + 64 * len(constraint.grammar)
