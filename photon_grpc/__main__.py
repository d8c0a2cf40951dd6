"""`python -m photon_grpc` is `photon-grpc`."""

import signal
import sys


def main() -> int:
    """Run the command line. Ctrl-C ends it without a traceback: the process while the command line is imported (130
    in the shell), with exit code 130 afterwards."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from photon_grpc.cli.main import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        return run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
