"""Pauses before a request is sent again, and when to give up."""

from __future__ import annotations

import random
import time

from photon_grpc.errors import Overloaded, PhotonError

_FIRST_S = 0.1
_LONGEST_S = 5.0
_FACTOR = 2.0


class Backoff:
    """Pauses that grow until there is progress: none at first, then 0.1 s to 5 s, less up to a half by chance."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: give up after so long without progress."""
        self._patience_s = patience_s
        self._next_s = 0.0
        #: Of the first failure since there was progress.
        self._since_s: float | None = None

    def progress(self) -> None:
        """Note progress: pauses begin anew."""
        self._since_s = None
        self._next_s = 0.0

    def pause_s(self, error: PhotonError) -> float:
        """The pause after `error`; at least what an overloaded server asks for. Raise `error` where the patience ends
        before it."""
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        if isinstance(error, Overloaded):
            pause_s = max(pause_s, error.retry_after_s or _FIRST_S)
        if now_s + pause_s - self._since_s > self._patience_s:
            raise error
        self._next_s = min(max(_FIRST_S, self._next_s * _FACTOR), _LONGEST_S)
        return pause_s
