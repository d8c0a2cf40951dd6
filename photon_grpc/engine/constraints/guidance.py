"""Grammars of llguidance, prepared beside the loop and cached, and masks of many rows filled in parallel.

Matchers of one compilation share its lexer under a lock, so in parallel they would only wait for each other. A grammar
of many rows is therefore compiled again as more requests use it, until each thread that fills masks has a lexer of it,
up to eight.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import cache
from math import log2
from typing import cast

import llguidance

from photon_grpc.config.model_dir import TOKENIZER_FILE, ModelConfig
from photon_grpc.core.ports import Event
from photon_grpc.core.request import Request
from photon_grpc.engine.constraints.grammar import Matcher, MatcherLost
from photon_grpc.engine.constraints.lexers import CompiledGrammar, Lexer, LexerCache
from photon_grpc.engine.constraints.matcher import GuidanceMatcher, address
from photon_grpc.engine.constraints.preparation import ExtraLexer, JobContext, PrepareAfterIds, PrepareAtStart
from photon_grpc.engine.constraints.special_tokens import rename_special_tokens
from photon_grpc.engine.constraints.worker import Worker

_LOG = logging.getLogger(__name__)

#: Most lexers of one grammar. Sixteen do not fill 64 masks sooner, and each learns separately.
_MAX_LEXERS = 8
#: Sets of tokens that the library adds to a mask at once if all of them may follow: white space, and text within a JSON
#: string of up to this many characters. It walks other tokens one by one. Its default steps, 10 and 30, leave more to
#: walk near the end of a string with a maximum length.
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{most}}}" for most in (6, 10, 16, 30)), f"{_TEXT}+"]

#: A state, and the number of the mask that it fills.
_Row = tuple[llguidance.LLMatcher, int]


class GuidanceGrammars:
    """Grammars of the engine's requests.

    Args:
        tokenizer: has the vocabulary of the model.
        wake: called when a job is done, in any thread (core.ports.Inbox.wake).
        num_threads: number of threads that fill masks.
        max_bytes: most bytes that lexers may take; None for 1 GiB.
    """

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        wake: Callable[[Event], None],
        num_threads: int,
        max_bytes: int | None = None,
    ) -> None:
        self._worker = Worker(wake)
        self.cache = LexerCache() if max_bytes is None else LexerCache(max_bytes)
        self._context = JobContext(tokenizer, self.cache)
        #: Executors by number of threads, a power of two or all of them.
        self._executor = cache(llguidance.LLExecutor)
        self._num_threads = num_threads

    def prepare(self, request: Request, ids: tuple[int, ...], is_anew: bool) -> PrepareAtStart | PrepareAfterIds | None:
        """Implement engine.constraints.grammar.Grammars."""
        if request.constraint is None:
            return None
        is_walked = bool(is_anew or ids)
        # A walk compiles a separate lexer, which no other request may use.
        grammar = self.cache.grammar(request.owner, request.constraint, is_kept=not is_walked)
        job: PrepareAtStart | PrepareAfterIds
        if is_walked:
            job = PrepareAfterIds(self._context, grammar, request, ids, is_anew)
        else:
            job = PrepareAtStart(self._context, grammar, request)
            self._spread(grammar)
        if job.awaits() is not None:
            self._worker.submit(job)
        return job

    def filler(self, matchers: Mapping[int, Matcher], mask_bytes: int) -> ParallelFiller:
        """Implement engine.constraints.grammar.Grammars."""
        mine = cast(Mapping[int, GuidanceMatcher], matchers)
        columns = _by_lexer(mine)
        num_rows: defaultdict[CompiledGrammar, int] = defaultdict(int)
        for column in columns:
            num_rows[mine[column[0][1]].grammar] += len(column)
        for grammar, num in num_rows.items():
            grammar.num_rows = num
        return ParallelFiller(mine, mask_bytes, *self._parts(columns))

    def _parts(self, columns: Collection[list[_Row]]) -> tuple[llguidance.LLExecutor, list[list[_Row]]]:
        """Return the threads, and lists of rows that they fill one list after another.

        All rows are one list with the rows of a lexer side by side: a thread takes a stretch of it, so that two threads
        seldom need the same lock. The number of threads is the power of two nearest to the rows divided by those of the
        most used lexer, since more threads would wait for each other. With one thread, each row is its own list, which
        the calling thread fills.
        """
        rows = [row for column in columns for row in column]
        num_parallel = 1 << round(log2(len(rows) / max(map(len, columns)))) if rows else 1
        if min(num_parallel, self._num_threads) == 1:
            return self._executor(1), [[row] for row in rows]
        return self._executor(min(num_parallel, self._num_threads)), [rows]

    def _spread(self, grammar: CompiledGrammar) -> None:
        """Compile a grammar with fewer lexers than rows once more, for later requests."""
        is_being_made = grammar.num_wanted > len(grammar.lexers)
        if is_being_made or grammar.num_wanted >= min(grammar.num_rows, self._num_threads, _MAX_LEXERS):
            return
        if self.cache.has_spare_room(grammar.next_lexer_bytes):
            grammar.num_wanted += 1
            self._worker.submit_spare(ExtraLexer(self._context, grammar))


class ParallelFiller:
    """Fills the masks of the same matchers in parallel.

    Args:
        matchers: the matchers, by the number of their masks.
        mask_bytes: size of one mask.
        threads: the threads that fill masks.
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
        #: Masks that are always corrected, and for the others the bytes and bits that show whether they must be. Their
        #: matchers know too, but reading those costs more, since other threads have just written there.
        self._corrected = [at for at, matcher in matchers.items() if not matcher.signs]
        self._signs = [
            (at, at * mask_bytes + byte, bits) for at, matcher in matchers.items() for byte, bits in matcher.signs
        ]

    def fill(self, masks: memoryview) -> dict[int, BaseException]:
        """Implement engine.constraints.grammar.MaskFiller."""
        size = self._mask_bytes
        start, num_masks = address(masks), len(masks) // size
        for part in self._parts:
            self._threads.unsafe_compute_mask_ptr(part, start, size, num_masks)
        failures: dict[int, BaseException] = {}
        for at in {*self._corrected, *[at for at, byte, bits in self._signs if masks[byte] & bits]}:
            try:
                self._matchers[at].correct(masks[at * size : (at + 1) * size])
            except BaseException as error:
                # The frames would hold the lexer until garbage is collected.
                failures[at] = error.with_traceback(None) if isinstance(error, MatcherLost) else error
        if failures:
            self._add_sharing(failures)
        return failures

    def _add_sharing(self, failures: dict[int, BaseException]) -> None:
        """Add the matchers that share a lexer that failed in this step.

        The lexer may have been used after its failure, so their masks cannot be trusted.
        """
        spent = {self._matchers[at].lexer for at, error in failures.items() if isinstance(error, MatcherLost)}
        for at, matcher in self._matchers.items():
            if matcher.lexer in spent and at not in failures:
                failures[at] = MatcherLost("a matcher beside it spent the lexer they share")


def read_vocabulary(model_config: ModelConfig) -> llguidance.LLTokenizer | None:
    """Return the vocabulary of a model; None if it has no tokenizer, or not the bytes of every token.

    This holds the interpreter's lock: 1.3 to 1.7 s of CPU for 128,000 tokens on a loaded machine.
    """
    if not model_config.has_tokenizer:
        return None
    try:
        text, special_ids = rename_special_tokens((model_config.path / TOKENIZER_FILE).read_bytes())
        # A model without an end gets one that is not text; otherwise the library takes id 0.
        ends = list(model_config.eos_token_ids) or special_ids[:1] or None
        return llguidance.LLTokenizer(text, n_vocab=model_config.vocab_size, eos_token=ends, slices=_SLICES)
    except Exception as error:
        _LOG.warning("outputs cannot be constrained: grammars cannot read %s: %s", TOKENIZER_FILE, error)
        return None


def _by_lexer(matchers: Mapping[int, GuidanceMatcher]) -> Collection[list[_Row]]:
    """Return the states and mask numbers of the matchers, one list per lexer."""
    columns: defaultdict[Lexer, list[_Row]] = defaultdict(list)
    for at, matcher in matchers.items():
        columns[matcher.lexer].append((matcher.state, at))
    return columns.values()
