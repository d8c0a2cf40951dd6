"""Matchers over llguidance: where an output is in its grammar."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, NoReturn

import llguidance

from photon_grpc.core.constraint import readable_error
from photon_grpc.engine.constraints.ends import Ends
from photon_grpc.engine.constraints.grammar import MatcherLost
from photon_grpc.engine.constraints.lexers import CompiledGrammar, Lexer
from photon_grpc.errors import InvalidConstraint

#: In the library's words where a lexer has failed: by its limits, by a panic, and by one of a matcher that shares it.
_LEXER_FAILED = ("lexer error", "panic", "PoisonError")
#: In its words for an id that may not follow.
_REFUSED = "doesn't satisfy the grammar"


class Walker(NamedTuple):
    """Has the library move one matcher without Python's interpreter lock, which it gives up for two matchers only."""

    threads: llguidance.LLExecutor
    #: Moved beside; has failed and stays where it is.
    idle: llguidance.LLMatcher
    #: Of one mask.
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
    """The state of one output. Every method raises MatcherLost where the lexer it shares has failed by the states of
    others, InvalidConstraint where the output alone is too complex.

    Args:
        grammar: of which `lexer` is compiled.
        lexer: is used until the output ends.
        ends: of the output.
    """

    __slots__ = ("__weakref__", "grammar", "lexer", "signs", "state", "_ends")

    def __init__(self, grammar: CompiledGrammar, lexer: Lexer, ends: Ends) -> None:
        self.grammar = grammar
        self.lexer = lexer
        self.state = lexer.lend(self)
        self._ends = ends
        #: Bytes of the library's mask, and bits: where none is set `correct` has nothing to do. Empty: it always has.
        self.signs = ends.signs

    def fill(self, mask: memoryview) -> None:
        self.state.unsafe_compute_mask_ptr(address(mask), len(mask))
        self.correct(mask)

    def correct(self, mask: memoryview) -> None:
        """Make the library's mask one of engine.grammar.Matcher.fill."""
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
        return self._moved(self.state.consume_token(token_id))

    def follow(self, token_id: int, walker: Walker) -> bool:
        """As an output that is drawn: fill a mask, and advance by an id that it allows. False where it does not. Leaves
        the interpreter's lock to others meanwhile."""
        self.state.unsafe_compute_mask_ptr(address(walker.memory), len(walker.memory))
        self._check()
        is_allowed = walker.memory[token_id >> 3] >> (token_id & 7) & 1 and not self._ends.holds(token_id)
        return bool(is_allowed) and self._moved(walker.consume(self.state, token_id))

    def roll_back(self, num_tokens: int) -> None:
        self.state.rollback(num_tokens)
        self._check()

    @property
    def is_complete(self) -> bool:
        return self.state.is_stopped()

    def _moved(self, is_moved: bool) -> bool:
        if is_moved:
            return True
        words: str = self.state.get_error()
        if _REFUSED in words:
            # A lexer that fails within a token refuses the rest of it.
            words = self.lexer.failure()
        if words:
            self._fail(words)
        return False

    def _check(self) -> None:
        if self.state.is_error():
            self._fail(self.state.get_error())

    def _fail(self, error: str) -> NoReturn:
        words, field = readable_error(error), self.grammar.constraint.field
        if any(sign in words for sign in _LEXER_FAILED):
            self.grammar.retire(self.lexer)
            if not self.lexer.fails_as_alone(words):
                raise MatcherLost(words)
        raise InvalidConstraint(f"{field}: too complex to go on: {words}", field=field)


def address(mask: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mask))
