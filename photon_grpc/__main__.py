"""The entry point of `photon-grpc` and `python -m photon_grpc`."""

import resource
import signal
import sys

#: With a lower limit, errors do not show their cause.
_LEAST_BYTES = 64 * 2**20


def main() -> int:
    """Run the command line; Ctrl-C ends it with 130, a lack of address space with 2, both without a traceback."""
    try:
        return _run()
    except Exception as error:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY or (limit >= _LEAST_BYTES and not _is_of_memory(error)):
            raise
        print(
            f"photon-grpc: `ulimit -v` allows {limit >> 20} MiB of address space, too little: raise it", file=sys.stderr
        )
        return 2


def _run() -> int:
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from photon_grpc.cli.main import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        return run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _is_of_memory(error: BaseException) -> bool:
    """Return whether the error reports a lack of memory, without importing address_space.py, which needs some."""
    signs = ("start new thread", "failed to map", "llocate memory")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


if __name__ == "__main__":
    sys.exit(main())
