"""Makes the matchers of a request beside the engine's loop: compiles its grammar and walks the ids that it has.

Ids are walked on a separate lexer of the request. The loop's masks therefore never wait for a lexer in use by a walk,
and the lexer learns only what the output itself would have taught it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import llguidance

from photon_grpc.core.constraint import MAX_LEXER_STATES
from photon_grpc.core.ports import Event
from photon_grpc.core.request import Request
from photon_grpc.engine.constraints.ends import EndIds
from photon_grpc.engine.constraints.grammar import MatcherLost
from photon_grpc.engine.constraints.lexers import (
    FIRST_LEXER_STATES,
    CompiledGrammar,
    Lexer,
    LexerCache,
    compile_lexer,
    lexer_bytes,
)
from photon_grpc.engine.constraints.matcher import GuidanceMatcher, Walker
from photon_grpc.engine.constraints.worker import Job, Progress
from photon_grpc.errors import InvalidConstraint, InvalidRequest

#: Time of a piece of a walk, and computing time of a whole walk in the thread; other threads add half as much.
_PIECE_S, MAX_WALK_S = 0.005, 15.0


class JobContext:
    """The library, the cache and the clock of the worker's jobs.

    Args:
        tokenizer: the vocabulary of grammars.
        cache: the grammars, and the memory of lexers.
        clock: in seconds.
        work_clock: CPU seconds of the calling thread.
    """

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        cache: LexerCache,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.cache = cache
        self.clock = clock
        self.work_clock = work_clock
        self.walker = Walker.of(tokenizer)
        self._tokenizer = tokenizer
        self._tokenizer_ends = tuple(tokenizer.eos_tokens)

    def ends(self, request: Request) -> EndIds:
        return EndIds(request.stop.eos_token_ids + request.stop.stop_token_ids, self._tokenizer_ends)

    def compile(self, grammar: CompiledGrammar, max_states: int) -> Lexer | str:
        """Return a new lexer of the grammar, or a text that says why there is none.

        If `max_states` are too few for the start of the grammar, it may learn all states.
        """
        lexer = compile_lexer(grammar, self._tokenizer, max_states)
        if isinstance(lexer, str) and max_states < MAX_LEXER_STATES:
            lexer = compile_lexer(grammar, self._tokenizer, MAX_LEXER_STATES)
        if isinstance(lexer, Lexer):
            self.cache.added(lexer)
        return lexer


class _GrammarJob(Job):
    """A job for one grammar."""

    __slots__ = ("_context", "_grammar")

    def __init__(self, context: JobContext, grammar: CompiledGrammar) -> None:
        super().__init__(grammar.owner)
        self._context = context
        self._grammar = grammar

    def cancel(self) -> None:
        """Implement engine.constraints.grammar.Preparation."""
        self.is_cancelled = True
        self._context.cache.leave(self)


class PrepareAtStart(_GrammarJob):
    """Makes matchers at the start of a grammar, on lexers that requests share."""

    __slots__ = ("_ends", "_lexer")

    def __init__(self, context: JobContext, grammar: CompiledGrammar, request: Request) -> None:
        super().__init__(context, grammar)
        self._ends = context.ends(request)
        self._lexer: Lexer | None = None
        self._hold_lexer()

    def awaits(self) -> Event | None:
        """Implement engine.constraints.grammar.Preparation."""
        return None if self._lexer is not None or self._grammar.problem or self.error else self

    def work(self) -> Progress:
        grammar, cache = self._grammar, self._context.cache
        if not grammar.is_done:
            if not cache.has_room(self, grammar.next_lexer_bytes):
                return Progress.NO_ROOM
            lexer = self._context.compile(grammar, grammar.max_states)
            if isinstance(lexer, Lexer):
                grammar.lexers.append(lexer)
            else:
                grammar.problem = lexer
        # Another job may have compiled the grammar while this one waited.
        cache.leave(self)
        # The loop may have retired the lexer meanwhile.
        return Progress.DONE if self._hold_lexer() or grammar.problem else Progress.MORE

    def matchers(self, num: int) -> list[GuidanceMatcher]:
        """Implement engine.constraints.grammar.Preparation."""
        grammar = self._grammar
        if self.error is not None:
            raise self.error
        if self._lexer is None:
            field = grammar.constraint.field
            raise InvalidConstraint(f"{field}: {grammar.problem}", field=field)
        # Whoever still holds this job must not keep the lexer in memory.
        lexer, self._lexer = self._lexer, None
        lexer.users.discard(self)
        return [GuidanceMatcher(grammar, grammar.least_used() or lexer, self._ends) for _ in range(num)]

    def _hold_lexer(self) -> bool:
        """Hold a lexer until `matchers` is called, so that it is not forgotten; return whether there is one."""
        lexer = self._grammar.least_used()
        if lexer is not None:
            lexer.users.add(self)
            # Last: as soon as it is set, the loop may call `matchers`.
            self._lexer = lexer
        return lexer is not None


class ExtraLexer(_GrammarJob):
    """Makes one more lexer for a grammar of many rows, since matchers that share one fill masks one after another."""

    __slots__ = ()

    def work(self) -> Progress:
        grammar = self._grammar
        if grammar.lexers and self._context.cache.has_spare_room(grammar.next_lexer_bytes):
            lexer = self._context.compile(grammar, grammar.max_states)
            if isinstance(lexer, Lexer):
                grammar.lexers.append(lexer)
        grammar.num_wanted = max(1, len(grammar.lexers))
        return Progress.DONE


class PrepareAfterIds(_GrammarJob):
    """Makes a matcher after ids, on a separate lexer.

    Args:
        request: the request with the output; its continued ids are the first of `ids`.
        ids: the ids to walk. Ids that end the output are skipped.
        is_anew: a lost matcher had walked them. The lexer may then learn all states, and the walk has no time limit.
    """

    __slots__ = ("_at", "_ids", "_is_anew", "_matcher", "_max_states", "_request", "_spent_s")

    def __init__(
        self, context: JobContext, grammar: CompiledGrammar, request: Request, ids: tuple[int, ...], is_anew: bool
    ) -> None:
        super().__init__(context, grammar)
        self._request = request
        self._ids = ids
        self._is_anew = is_anew
        self._max_states = MAX_LEXER_STATES if is_anew else FIRST_LEXER_STATES
        self._matcher: GuidanceMatcher | None = None
        self._at = 0
        self._spent_s = 0.0

    def awaits(self) -> Event | None:
        """Implement engine.constraints.grammar.Preparation."""
        is_done = self.error is not None or (self._matcher is not None and self._at == len(self._ids))
        return None if is_done else self

    def work(self) -> Progress:
        try:
            if self._matcher is None and not self._begin():
                return Progress.NO_ROOM
            return self._walk_a_piece()
        except MatcherLost:
            if self._max_states == MAX_LEXER_STATES:
                raise
            self._max_states, self._matcher, self._at = MAX_LEXER_STATES, None, 0
            return Progress.MORE

    def matchers(self, num: int) -> list[GuidanceMatcher]:
        """Implement engine.constraints.grammar.Preparation; of one output."""
        if self.error is not None:
            raise self.error
        assert self._matcher is not None
        return [self._matcher]

    def _begin(self) -> bool:
        """Make the matcher; return False if there is no room for its lexer."""
        grammar = self._grammar
        if not self._context.cache.has_room(self, lexer_bytes(grammar.constraint, self._max_states)):
            return False
        lexer = self._context.compile(grammar, self._max_states)
        if isinstance(lexer, str):
            field = grammar.constraint.field
            raise InvalidConstraint(f"{field}: {lexer}", field=field)
        self._matcher = GuidanceMatcher(grammar, lexer, self._context.ends(self._request))
        return True

    def _walk_a_piece(self) -> Progress:
        assert self._matcher is not None
        stop, clock = self._request.stop, self._context.clock
        ends = {*stop.eos_token_ids, *stop.stop_token_ids}
        begun_s, before_s = clock(), self._context.work_clock()
        while self._at < len(self._ids):
            token_id = self._ids[self._at]
            if token_id not in ends and not self._matcher.follow(token_id, self._context.walker):
                raise self._refusal(token_id)
            self._at += 1
            if clock() - begun_s >= _PIECE_S:
                break
        self._spent_s += self._context.work_clock() - before_s
        if self._at == len(self._ids):
            return Progress.DONE
        if self._spent_s > MAX_WALK_S and not self._is_anew:
            raise self._too_long()
        return Progress.MORE

    def _refusal(self, token_id: int) -> Exception:
        if self._at >= len(self._request.continued_ids):
            return ValueError(f"id {token_id} was sampled though the constraint does not allow it")
        field = f"continue_from.ids[{self._at}]"
        return InvalidRequest(f"{field}: {token_id} may not follow under {self._grammar.constraint.field}", field=field)

    def _too_long(self) -> InvalidConstraint:
        field = self._grammar.constraint.field
        message = (
            f"{field}: following {self._at} of {len(self._ids)} ids of the output through the constraint took "
            f"{self._spent_s:.0f} s of computing; {MAX_WALK_S:.0f} s are allowed: simplify it or continue less"
        )
        return InvalidConstraint(message, field=field, needed=len(self._ids), limit=self._at)
