"""The limit on address space (`ulimit -v`), which ends a start with one line if it is too low.

Otherwise a start would end with a traceback, or hang in a library that retries (OpenBLAS).
"""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

from photon_grpc.errors import StartupError

#: Error texts of the loader, Python, torch and C++ when no address space is left.
_SIGNS = (
    *("memoryerror", "failed to map segment", "cannot allocate memory", "can't allocate memory", "not enough memory"),
    *("bad_alloc", "can't start new thread", "cannot create thread", "resource temporarily unavailable"),
)
#: Address space for the stacks of threads and a small model, besides the libraries.
_HEADROOM_BYTES = 256 * 2**20
_MAX_CPU_S, _TIMEOUT_S = 30, 300

#: Imports what the engine imports, under the limit less the headroom.
_TRY = """
import resource, sys
limit, cpu_s = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
import photon_grpc.bridge.host, photon_grpc.compose.assemble
"""


def limit_bytes() -> int | None:
    """Return the limit on the address space of this process and its children; None if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_limit() -> None:
    """Raise StartupError if the engine's libraries, which need most, do not fit. Takes seconds if there is a limit."""
    limit = limit_bytes()
    if limit is None:
        return
    command = [sys.executable, "-c", _TRY, str(max(limit - _HEADROOM_BYTES, 1)), str(_MAX_CPU_S)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise StartupError(advice("the engine")) from None
    except OSError as error:
        if is_met_by(error):
            raise StartupError(advice("the engine")) from None
        raise
    if done.returncode < 0 or (done.returncode and _is_sign(done.stderr.decode(errors="replace"))):
        raise StartupError(advice("the engine"))


def is_met_by(error: BaseException | None) -> bool:
    """Return whether there is a limit and the error, or one of its causes, reports a lack of memory."""
    while error is not None and limit_bytes() is not None:
        is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if isinstance(error, MemoryError) or is_refused or _is_sign(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def advice(process: str) -> str:
    """Return the error message for a process, such as `the engine`, with the limit and what to do."""
    limit = (limit_bytes() or 0) / 2**20
    return (
        f"{process} needs more address space than `ulimit -v` allows ({limit:,.0f} MiB): remove the limit with `ulimit "
        "-v unlimited`. Libraries map far more than they use; limit the memory of the container or cgroup instead"
    )


def hint() -> str:
    """Return a note on the limit for a process that ended without a reason; "" without a limit."""
    limit = limit_bytes()
    return "" if limit is None else f"; `ulimit -v` allows {limit / 2**20:,.0f} MiB of address space: is it too little?"


def _is_sign(text: str) -> bool:
    return any(sign in text.lower() for sign in _SIGNS)
