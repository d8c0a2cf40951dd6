"""Signals of the service's processes: those that ask for its end, and those that mean nothing to it."""

from __future__ import annotations

import signal

#: They reach whole process groups: for the supervisor, not for its children.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

#: Has a child print the stacks of its threads on stderr, whatever it does.
WHERE_SIGNAL = signal.SIGUSR1

#: Unhandled they would end a process, and nobody who sends one wants that. (Python itself ignores SIGPIPE.)
IDLE_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR")
    if hasattr(signal, name)
)
