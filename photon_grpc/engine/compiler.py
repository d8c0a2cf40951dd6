"""Compiles grammars of llguidance in a thread beside the engine's loop, one at a time.

The library holds the interpreter's lock only while it reads the text.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from weakref import WeakSet

import llguidance

from photon_grpc.core.constraint import Constraint, told
from photon_grpc.core.ports import Event
from photon_grpc.engine.unique_keys import KeyTokens

#: More than the front ends' trial has: what ended there well does so here.
_STACK_BYTES = 64 * 2**20


class Compilation(Event):
    """One grammar, compiled or not yet. The compiling thread sets `problem`, once, or adds to `matchers`."""

    __slots__ = (
        "__weakref__",
        "_users",
        "constraint",
        "is_broken",
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
        #: A matcher has panicked, and left the lexer it shares locked for good.
        self.is_broken = False
        self.problem = ""
        #: Of each of `matchers`.
        self._users: defaultdict[llguidance.LLMatcher, WeakSet[object]] = defaultdict(WeakSet)

    @property
    def is_done(self) -> bool:
        return bool(self.matchers) or bool(self.problem)

    def lend(self, user: object) -> llguidance.LLMatcher:
        """Whichever of `matchers` has the fewest users that are alive: as outputs end, in whatever order, rows stay
        shared out over the lexers."""
        matcher = min(self.matchers, key=lambda matcher: len(self._users[matcher]))
        self._users[matcher].add(user)
        return matcher


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
        compilation.problem = told(matcher.get_error())
    else:
        compilation.matchers.append(matcher)
