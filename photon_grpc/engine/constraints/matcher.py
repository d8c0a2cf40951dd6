"""Matchers over llguidance, which hold the position of an output in its grammar."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, NoReturn

import llguidance

from photon_grpc.core.constraint import readable_error
from photon_grpc.engine.constraints.ends import EndIds
from photon_grpc.engine.constraints.grammar import MatcherLost
from photon_grpc.engine.constraints.lexers import CompiledGrammar, Lexer
from photon_grpc.errors import InvalidConstraint

#: Parts of the library's message when a lexer has failed: by its limits, by a panic, or by a panic of another matcher.
_LEXER_FAILED = ("lexer error", "panic", "PoisonError")
#: Part of its message for an id that may not follow.
_REFUSED = "doesn't satisfy the grammar"


class Walker(NamedTuple):
    """Moves one matcher without the interpreter's lock, which the library releases only for two or more matchers."""

    threads: llguidance.LLExecutor
    #: The second matcher, which has failed and never moves.
    idle: llguidance.LLMatcher
    #: Memory of one mask.
    memory: memoryview

    @classmethod
    def of(cls, tokenizer: llguidance.LLTokenizer) -> Walker:
        """Return a walker for this vocabulary."""
        idle = llguidance.LLMatcher(tokenizer, "no grammar", log_level=0)
        return cls(llguidance.LLExecutor(1), idle, memoryview(bytearray(4 * -(-tokenizer.vocab_size // 32))))

    def consume(self, state: llguidance.LLMatcher, token_id: int) -> bool:
        moved: list[bool] = self.threads.consume_token_par([(state, token_id), (self.idle, token_id)])
        return moved[0]


class GuidanceMatcher:
    """The state of one output.

    Every method raises MatcherLost if the shared lexer has failed because of other outputs, and InvalidConstraint if
    the output alone is too complex.

    Args:
        grammar: from which `lexer` was compiled.
        lexer: used until the output ends.
        ends: the ids that end the output.
    """

    __slots__ = ("__weakref__", "grammar", "lexer", "signs", "state", "_ends")

    def __init__(self, grammar: CompiledGrammar, lexer: Lexer, ends: EndIds) -> None:
        self.grammar = grammar
        self.lexer = lexer
        self.state = lexer.lend(self)
        self._ends = ends
        #: Bytes and bits of the library's mask. If none is set, `correct` is not needed. Empty: it is always needed.
        self.signs = ends.signs

    def fill(self, mask: memoryview) -> None:
        self.state.unsafe_compute_mask_ptr(address(mask), len(mask))
        self.correct(mask)

    def correct(self, mask: memoryview) -> None:
        """Turn the library's mask into that of engine.constraints.grammar.Matcher.fill."""
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
        # The same as `accept` without its trial, which takes as long again.
        return self._moved(self.state.consume_token(token_id))

    def follow(self, token_id: int, walker: Walker) -> bool:
        """Fill a mask as for a sampled output, and advance by an id if the mask allows it; return whether it does.

        Other threads may hold the interpreter's lock meanwhile.
        """
        self.state.unsafe_compute_mask_ptr(address(walker.memory), len(walker.memory))
        self._check()
        is_allowed = walker.memory[token_id >> 3] >> (token_id & 7) & 1 and not self._ends.holds(token_id)
        return bool(is_allowed) and self._moved(walker.consume(self.state, token_id))

    def roll_back(self, num_tokens: int) -> None:
        self.state.rollback(num_tokens)
        self._check()

    def forced(self) -> tuple[int, ...]:
        if self.state.is_stopped():
            return ()
        found: list[int] = self.state.compute_ff_tokens()
        self._check()
        return tuple(found)

    @property
    def is_complete(self) -> bool:
        return self.state.is_stopped()

    def _moved(self, is_moved: bool) -> bool:
        if is_moved:
            return True
        message: str = self.state.get_error()
        if _REFUSED in message:
            # A lexer that fails within a token refuses the rest of it.
            message = self.lexer.failure()
        if message:
            self._fail(message)
        return False

    def _check(self) -> None:
        if self.state.is_error():
            self._fail(self.state.get_error())

    def _fail(self, error: str) -> NoReturn:
        message, field = readable_error(error), self.grammar.constraint.field
        if any(sign in message for sign in _LEXER_FAILED):
            self.grammar.retire(self.lexer)
            if not self.lexer.fails_as_alone(message):
                raise MatcherLost(message)
        raise InvalidConstraint(f"{field}: too complex to go on: {message}", field=field)


def address(mask: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mask))
