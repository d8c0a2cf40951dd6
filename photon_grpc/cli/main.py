"""The command line: the verbs, the exit codes, and the streams as the shell left them.

Imports little: `serve` must not load gRPC, `generate` must not load torch, `--help` neither.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
from collections.abc import Sequence

import click

from photon_grpc import __version__
from photon_grpc.cli.bench_flags import bench
from photon_grpc.cli.convert import convert
from photon_grpc.cli.generate import batch, chat, generate
from photon_grpc.cli.health import health
from photon_grpc.cli.keys import keys
from photon_grpc.cli.quarantine import quarantine
from photon_grpc.cli.serve import doctor, run, serve
from photon_grpc.cli.terminal.connection import advice_on_reaching
from photon_grpc.cli.top import top
from photon_grpc.cli.trace import trace
from photon_grpc.config.resolve import CLIENT_VARIABLES
from photon_grpc.config.settings import is_text
from photon_grpc.errors import ConfigError, PhotonError, StartupError

#: Ended by Ctrl-C, as shells count: 128 + SIGINT.
INTERRUPTED = 130
#: Ratio of equal characters from which one option's name may be meant by another's.
_NEAR = 0.7


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code: 0, 1 for a failed call, 2 for a wrong command line, 130 after
    Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_streams()
    try:
        _refuse_bytes(arguments)
        return int(cli.main(args=list(arguments), prog_name="photon-grpc", standalone_mode=False) or 0)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            error.possibilities[:] = [each for each in error.possibilities if _is_near(error.option_name, each)]
        error.show()
        return 2
    except click.Abort:
        return INTERRUPTED
    except StartupError as error:
        _complain(str(error))
        return 2
    except PhotonError as error:
        _complain(f"{error.reason}: {error}{_advice(error)}")
        return 1
    except OSError as error:
        _complain(str(error))
        return 1


def _open_streams() -> None:
    """Replace a stream that the shell closed by /dev/null, and characters that stdout's encoding lacks by question
    marks."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        # The C and POSIX locales would let bytes that are no text through.
        sys.stdin.reconfigure(errors="strict")


def _refuse_bytes(arguments: Sequence[str]) -> None:
    """Raise ConfigError for bytes that were no text in the shell: Python holds them as lone surrogates."""
    for text in (*arguments, *(os.environ.get(name, "") for name in CLIENT_VARIABLES)):
        if not is_text(text):
            raise ConfigError(f"{text!r} holds bytes that are not text")


def _is_near(option: str, other: str) -> bool:
    """Without the dashes that all have, which are enough for click to take --foo for --tools."""
    option, other = option.lstrip("-"), other.lstrip("-")
    is_part = option.startswith(other) or other.startswith(option)
    return is_part or difflib.SequenceMatcher(None, option, other).ratio() >= _NEAR


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="photon-grpc", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve a language model over gRPC, and talk to it.

    \b
    photon-grpc serve                        the embedded demo model on 127.0.0.1:50051
    photon-grpc serve ./my-model             a Hugging Face directory, or an id such as Qwen/Qwen3-0.6B
    photon-grpc generate "def fib(n):"       text from a running server
    photon-grpc bench --concurrency 32       how fast a running server is
    """
    if click.get_current_context().invoked_subcommand != "serve":
        # gRPC reads it when it is imported, and else writes lines of its own between ours.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


for verb in (serve, run, doctor, convert, health, generate, chat, batch, bench, keys, top, trace, quarantine):
    cli.add_command(verb)


def _advice(error: PhotonError) -> str:
    if error.reason == "UNREACHABLE":
        return f"\n{advice_on_reaching(error)}".rstrip()
    if error.reason == "MISSING_CREDENTIALS":
        return "\nPut the key into the variable PHOTON_API_KEY."
    return f" (again in {error.retry_after_s:g} s)" if error.retry_after_s else ""


def _complain(text: str) -> None:
    print(f"photon-grpc: {text}", file=sys.stderr)
