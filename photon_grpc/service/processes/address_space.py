"""A limit on address space (`ulimit -v`) that is too small ends a start with one line: not with a traceback of whatever
met it, and not with a library that tries for ever (OpenBLAS)."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

from photon_grpc.errors import StartupError

#: What the loader, Python, torch and C++ say where none is left.
_SIGNS = (
    *("memoryerror", "failed to map segment", "cannot allocate memory", "can't allocate memory", "not enough memory"),
    *("bad_alloc", "can't start new thread", "cannot create thread", "resource temporarily unavailable"),
)
#: Beyond what libraries map: stacks of threads, a small model.
_HEADROOM_BYTES = 256 * 2**20
_MAX_CPU_S, _TIMEOUT_S = 30, 300

#: Loads what the engine loads, with the headroom taken away.
_TRY = """
import resource, sys
limit, cpu_s = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
import photon_grpc.bridge.host, photon_grpc.compose.assemble
"""


def limit_bytes() -> int | None:
    """Address space that this process and its children may have; None: as much as they want."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_limit() -> None:
    """Raise StartupError where the engine's libraries, which need most, find no room. Takes seconds, where there is a
    limit at all."""
    limit = limit_bytes()
    if limit is None:
        return
    command = [sys.executable, "-c", _TRY, str(max(limit - _HEADROOM_BYTES, 1)), str(_MAX_CPU_S)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise StartupError(told("the engine")) from None
    except OSError as error:
        if is_met_by(error):
            raise StartupError(told("the engine")) from None
        raise
    if done.returncode < 0 or (done.returncode and _is_sign(done.stderr.decode(errors="replace"))):
        raise StartupError(told("the engine"))


def is_met_by(error: BaseException | None) -> bool:
    """Return whether there is a limit and the error, or what it arose from, says that no more was to be had."""
    while error is not None and limit_bytes() is not None:
        is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if isinstance(error, MemoryError) or is_refused or _is_sign(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def told(process: str) -> str:
    """Return the line: whose, which limit, what to do. `process`: `the engine`."""
    limit = (limit_bytes() or 0) / 2**20
    return (
        f"{process} needs more address space than `ulimit -v` allows ({limit:,.0f} MiB): `ulimit -v unlimited` lifts "
        "it. Libraries map far more than they use; limit the memory of the container or cgroup instead"
    )


def hint() -> str:
    """Behind the end of a process that could say nothing; "" without a limit."""
    limit = limit_bytes()
    return "" if limit is None else f"; `ulimit -v` allows {limit / 2**20:,.0f} MiB of address space: is it too little?"


def _is_sign(text: str) -> bool:
    return any(sign in text.lower() for sign in _SIGNS)
