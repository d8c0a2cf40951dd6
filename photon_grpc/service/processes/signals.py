"""Signals of the service's processes: those that request its end, and those that it ignores."""

from __future__ import annotations

import signal

#: They reach whole process groups, but only the supervisor reacts to them, not its children.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

#: Makes a child print the stacks of its threads on stderr, even if it hangs.
WHERE_SIGNAL = signal.SIGUSR1

#: They would end a process without a handler, which senders do not intend. (Python itself ignores SIGPIPE.)
IDLE_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR")
    if hasattr(signal, name)
)
