"""Compiled grammars, the lexers that their matchers share, and the memory that lexers may take.

A lexer of llguidance learns each new state that a matcher meets, and keeps it. When it has reached its limit of states,
or the limit of work for one mask, it fails permanently, and with it every matcher that shares it. Three rules keep the
states of one output from changing the answer of another:

* a lexer is shared by outputs of one owner only;
* a matcher whose lexer fails is made again on its own lexer (engine.constraints.grammar.MatcherLost), where only its
  own states count. One that was the only user of that lexer fails, as it would alone;
* a lexer counts with the states that it may learn, so that the sum is a bound. The first lexer of a grammar may learn
  few, since few grammars need more; the next one may learn all that a request may need.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from weakref import WeakSet

import llguidance

from photon_grpc.core.constraint import MAX_LEXER_STATES, Constraint, readable_error
from photon_grpc.engine.constraints.worker import Job

#: Most states of the first lexer of a grammar.
FIRST_LEXER_STATES = 4_000
#: Most bytes of all lexers, and of those that no output uses, by `lexer_bytes`.
_MAX_BYTES, _MAX_UNUSED_BYTES = 2**30, 2**29
#: The share of the memory that one owner may use.
_OWNER_SHARE = 0.75
#: Most grammars that are kept, with or without lexers.
_MAX_GRAMMARS = 1_024
#: Bytes per state: 420 to 820 were measured (alphabets of 20 to 250 byte classes).
_STATE_BYTES = 820
#: Part of the library's error message when a lexer has reached its limit of states.
_FULL = "too many states"
#: Bytes of a lexer without states, and per character of its grammar.
_LEXER_BYTES, _CHARACTER_BYTES = 2**19, 64


class Lexer:
    """A matcher at the start of its grammar, and the lexer that all copies of it share.

    Args:
        beginning: the matcher, which is copied for use.
        grammar: from which it was compiled.
        max_states: most states that it may learn.
    """

    __slots__ = ("__weakref__", "beginning", "max_states", "num_bytes", "num_users", "owner", "users")

    def __init__(self, beginning: llguidance.LLMatcher, grammar: CompiledGrammar, max_states: int) -> None:
        self.beginning = beginning
        self.owner = grammar.owner
        self.max_states = max_states
        self.num_bytes = lexer_bytes(grammar.constraint, max_states)
        #: Live matchers, and the number of matchers so far.
        self.users: WeakSet[object] = WeakSet()
        self.num_users = 0

    def lend(self, user: object) -> llguidance.LLMatcher:
        self.users.add(user)
        self.num_users += 1
        return self.beginning.deep_copy()

    def failure(self) -> str:
        """Return the library's error message if the lexer has failed, else an empty text."""
        probe = self.beginning.deep_copy()
        probe.compute_bitmask()
        error: str = probe.get_error()
        return error

    def fails_as_alone(self, message: str) -> bool:
        """Return whether its only user would also fail alone on a lexer with all states, by the error message."""
        return self.num_users == 1 and (self.max_states == MAX_LEXER_STATES or _FULL not in message)


class CompiledGrammar:
    """A constraint as one owner uses it. The worker's thread adds lexers or sets `problem`; the loop retires lexers.

    Args:
        owner: the owner of the requests.
        constraint: the constraint to compile.
    """

    __slots__ = (
        "__weakref__",
        "constraint",
        "lexers",
        "max_states",
        "num_bytes",
        "num_rows",
        "num_wanted",
        "owner",
        "problem",
    )

    def __init__(self, owner: str, constraint: Constraint) -> None:
        self.owner = owner
        self.constraint = constraint
        self.lexers: list[Lexer] = []
        #: Number of its lexers, including those being made.
        self.num_wanted = 1
        #: Rows of the last step with this grammar.
        self.num_rows = 0
        #: Most states of the next lexer.
        self.max_states = FIRST_LEXER_STATES
        #: Why it cannot be compiled.
        self.problem = ""
        self.num_bytes = _LEXER_BYTES // 1024 + 4 * len(constraint.grammar)

    @property
    def is_done(self) -> bool:
        return bool(self.lexers) or bool(self.problem)

    @property
    def next_lexer_bytes(self) -> int:
        return lexer_bytes(self.constraint, self.max_states)

    def least_used(self) -> Lexer | None:
        """Return the lexer with the fewest users, so that rows stay spread over the lexers as outputs end."""
        return min(tuple(self.lexers), key=lambda lexer: len(lexer.users), default=None)

    def retire(self, lexer: Lexer) -> None:
        """Remove a lexer that has failed; the next one may learn all states."""
        if lexer in self.lexers:
            self.lexers.remove(lexer)
            self.num_wanted = max(1, len(self.lexers))
            self.max_states = MAX_LEXER_STATES


class LexerCache:
    """Recently used grammars, and the memory of all lexers. Safe for the loop and the worker's thread.

    Args:
        max_bytes: most bytes of all lexers.
        max_unused_bytes: most bytes of lexers that no output uses.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, max_unused_bytes: int = _MAX_UNUSED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_unused_bytes = min(max_unused_bytes, max_bytes)
        self._lock = threading.RLock()
        #: Oldest use first.
        self._kept: OrderedDict[tuple[str, Constraint], CompiledGrammar] = OrderedDict()
        self._alive: WeakSet[Lexer] = WeakSet()
        #: Job that waits for room -> the bytes that it needs, oldest first.
        self._waiting: dict[Job, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def grammar(self, owner: str, constraint: Constraint, *, is_kept: bool = True) -> CompiledGrammar:
        """Return the owner's grammar, which may still have to be compiled; keep a new one only with `is_kept`."""
        key = owner, constraint
        with self._lock:
            grammar = self._kept.get(key)
            if grammar is None:
                grammar = CompiledGrammar(owner, constraint)
                if not is_kept:
                    return grammar
                self._kept[key] = grammar
                self._trim()
            self._kept.move_to_end(key)
            return grammar

    def num_bytes(self, owner: str | None = None) -> int:
        """Return the bytes that live lexers may take, of all owners or of one."""
        return sum([lexer.num_bytes for lexer in self._alive if owner is None or lexer.owner == owner])

    def has_room(self, job: Job, num_bytes: int) -> bool:
        """Return whether `job` may make a lexer of this size now, after unused ones were forgotten.

        Otherwise the job waits until it asks again or leaves. The owner with the least memory is first, among those
        below their share. A lexer of any size fits into empty memory.
        """
        with self._lock:
            self._waiting[job] = num_bytes
            if not self._is_next(job) or not self._fits(job.owner, num_bytes):
                return False
            del self._waiting[job]
            return True

    def leave(self, job: Job) -> None:
        """Forget a job that no longer waits for room."""
        with self._lock:
            self._waiting.pop(job, None)

    def has_spare_room(self, num_bytes: int) -> bool:
        """Return whether a further lexer of a grammar fits into a quarter of the memory, while no job waits."""
        with self._lock:
            return not self._waiting and 4 * (self.num_bytes() + num_bytes) <= self._max_bytes

    def added(self, lexer: Lexer) -> None:
        with self._lock:
            self._alive.add(lexer)
            self._trim()

    def _is_next(self, job: Job) -> bool:
        held: Counter[str] = Counter()
        for lexer in self._alive:
            held[lexer.owner] += lexer.num_bytes
        share = _OWNER_SHARE * self._max_bytes
        before = (
            each
            for each, num_bytes in self._waiting.items()
            if not each.is_cancelled
            and (each.owner == job.owner or not held[each.owner] or held[each.owner] + num_bytes <= share)
        )
        return min(before, key=lambda each: held[each.owner]) is job

    def _fits(self, owner: str, num_bytes: int) -> bool:
        while True:
            mine = self.num_bytes(owner)
            if mine and mine + num_bytes > _OWNER_SHARE * self._max_bytes:
                if not self._forget_one(owner):
                    return False
                continue
            total = self.num_bytes()
            if not total or total + num_bytes <= self._max_bytes:
                return True
            if not self._forget_one():
                return False

    def _trim(self) -> None:
        """Forget grammars until the unused ones are within their limits."""
        while (len(self._kept) > _MAX_GRAMMARS or self._unused_bytes() > self._max_unused_bytes) and self._forget_one():
            pass

    def _unused_bytes(self) -> int:
        with_text = sum([grammar.num_bytes for grammar in self._kept.values()])
        return with_text + sum([lexer.num_bytes for lexer in self._alive if not lexer.users])

    def _forget_one(self, owner: str | None = None) -> bool:
        """Forget the least recently used grammar without outputs, of `owner` or of the owner with most of them."""
        unused = [key for key, kept in self._kept.items() if not any(lexer.users for lexer in kept.lexers)]
        # The newest one was just requested.
        unused = [key for key in unused if key != next(reversed(self._kept))]
        if owner is None and unused:
            held: Counter[str] = Counter()
            for key in unused:
                held[key[0]] += self._weight(self._kept[key])
            owner = max(held, key=held.__getitem__)
        oldest = next((key for key in unused if key[0] == owner), None)
        if oldest is None:
            return False
        # Jobs that are done may hold the grammar for longer, and no memory would be freed.
        self._kept.pop(oldest).lexers.clear()
        return True

    @staticmethod
    def _weight(grammar: CompiledGrammar) -> int:
        return grammar.num_bytes + sum([lexer.num_bytes for lexer in grammar.lexers])


def compile_lexer(grammar: CompiledGrammar, tokenizer: llguidance.LLTokenizer, max_states: int) -> Lexer | str:
    """Return the lexer, or a text that says why there is none.

    This takes long, but the library holds the interpreter's lock only while it reads the text.
    """
    try:
        limits = llguidance.LLParserLimits(**{**grammar.constraint.limits, "max_lexer_states": max_states})
        matcher = llguidance.LLMatcher(tokenizer, grammar.constraint.grammar, log_level=0, limits=limits)
        # The lexer learns the first states here.
        matcher.deep_copy().compute_bitmask()
    except BaseException as error:  # a panic of the library is not an Exception
        return f"cannot be compiled ({type(error).__name__})"
    return readable_error(matcher.get_error()) if matcher.is_error() else Lexer(matcher, grammar, max_states)


def lexer_bytes(constraint: Constraint, max_states: int) -> int:
    """Return the most bytes that a lexer takes with this many states."""
    return _LEXER_BYTES + _CHARACTER_BYTES * len(constraint.grammar) + _STATE_BYTES * max_states
