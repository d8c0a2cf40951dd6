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
from photon_grpc.cli.calibrate import calibrate
from photon_grpc.cli.convert import convert
from photon_grpc.cli.generate import batch, chat, generate
from photon_grpc.cli.health import health
from photon_grpc.cli.keys import keys
from photon_grpc.cli.quantize import quantize
from photon_grpc.cli.quarantine import quarantine
from photon_grpc.cli.serve import doctor, run, serve
from photon_grpc.cli.service import service
from photon_grpc.cli.terminal.connection import advice_on_reaching
from photon_grpc.cli.top import top
from photon_grpc.cli.trace import trace
from photon_grpc.config.resolve import CLIENT_VARIABLES
from photon_grpc.config.settings import is_text
from photon_grpc.errors import ConfigError, PhotonError, StartupError

#: Exit code after Ctrl-C, as shells count: 128 + SIGINT.
INTERRUPTED = 130
#: Least ratio of equal characters at which one option's name is suggested for another.
_NEAR = 0.7


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 is success, 1 a failed call, 2 a wrong command line, 130 a Ctrl-C.
    """
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
    """Replace a closed stream by /dev/null; have stdout replace characters that its encoding lacks by "?"."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        # In the C and POSIX locales stdin would accept bytes that are not text.
        sys.stdin.reconfigure(errors="strict")


def _refuse_bytes(arguments: Sequence[str]) -> None:
    """Raise ConfigError for arguments and variables that are not text: Python holds such bytes as lone surrogates."""
    for text in (*arguments, *(os.environ.get(name, "") for name in CLIENT_VARIABLES)):
        if not is_text(text):
            raise ConfigError(f"{text!r} holds bytes that are not text")


def _is_near(option: str, other: str) -> bool:
    """Compare the names without their dashes, which alone would make click suggest --tools for --foo."""
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
    photon-grpc bench --concurrency 32       the speed of a running server
    """
    if click.get_current_context().invoked_subcommand != "serve":
        # gRPC reads it when it is imported; otherwise it writes its own lines between ours.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


for verb in (
    serve,
    run,
    doctor,
    convert,
    calibrate,
    quantize,
    health,
    generate,
    chat,
    batch,
    bench,
    keys,
    top,
    trace,
    quarantine,
    service,
):
    cli.add_command(verb)


def _advice(error: PhotonError) -> str:
    if error.reason == "UNREACHABLE":
        return f"\n{advice_on_reaching(error)}".rstrip()
    if error.reason == "MISSING_CREDENTIALS":
        return "\nSet the variable PHOTON_API_KEY to your key."
    return f" (retry in {error.retry_after_s:g} s)" if error.retry_after_s else ""


def _complain(text: str) -> None:
    print(f"photon-grpc: {text}", file=sys.stderr)
