"""The command line. Flags, help and checks of `serve` are derived from `config`; what a verb does is elsewhere.

Imports little: `serve` must not load gRPC, `generate` must not load torch, `--help` neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from photon_grpc import __version__
from photon_grpc.config.resolve import CLIENT_VARIABLES, Resolved, resolve
from photon_grpc.config.settings import Setting, by_name, is_text, settings
from photon_grpc.errors import ConfigError, PhotonError, StartupError

F = TypeVar("F", bound=Callable[..., Any])

#: Ended by Ctrl-C, as shells count: 128 + SIGINT.
INTERRUPTED = 130

_SERVER_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "msgspec", "grpc_reflection")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code: 0, 1 for a call that failed, 2 for what was asked wrongly, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_streams()
    try:
        _refuse_bytes(arguments)
        return int(cli.main(args=list(arguments), prog_name="photon-grpc", standalone_mode=False) or 0)
    except click.ClickException as error:
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
    """A stream that the shell closed is nowhere; a character that stdout's encoding lacks is a question mark."""
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
    """What was no text in the shell is none in a message: Python holds it as lone surrogates."""
    for text in (*arguments, *(os.environ.get(name, "") for name in CLIENT_VARIABLES)):
        if not is_text(text):
            raise ConfigError(f"{text!r} holds bytes that are no text")


@contextlib.contextmanager
def _reading_stdin() -> Iterator[None]:
    if sys.stdin is None:
        raise ConfigError("stdin is closed")
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin holds bytes that are no {error.encoding} text") from None


# How the flags of `serve` come about -----------------------------------------------------------------------------------


class SettingOption(click.Option):
    """A flag made from a Setting. Its text is handed on as it is: `resolve` alone knows what is allowed."""

    def __init__(self, setting: Setting) -> None:
        is_switch = setting.kind is bool
        names = f"{setting.flag}/{setting.no_flag}" if is_switch else setting.flag
        super().__init__(
            [setting.name, names],
            default=None,
            multiple=setting.many,
            type=None if is_switch else click.STRING,
            metavar=None if is_switch else _metavar(setting),
            help=f"{setting.help}{_default(setting)}",
        )
        self.setting = setting

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """`--[no-]enforce-eager` says in half a line what both spellings side by side say in two."""
        record = super().get_help_record(ctx)
        is_switch = self.setting.kind is bool and record is not None
        return (f"--[no-]{self.setting.flag[2:]}", record[1]) if is_switch and record else record


class SettingsCommand(click.Command):
    """A command that takes every setting as a flag, its help grouped under the headings of `config/flags.py`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [SettingOption(setting) for setting in settings()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = param.setting.title if isinstance(param, SettingOption) else "Other"
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=34)


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return f"[{'|'.join(setting.choices)}]"
    return setting.metavar or {int: "N", float: "X", str: "TEXT"}[setting.kind]


def _default(setting: Setting) -> str:
    if setting.default is None or setting.default in ("", ()):
        return ""
    if setting.kind is bool:
        return f"  [default: {'on' if setting.default else 'off'}]"
    shown = ", ".join(setting.default) if setting.many else setting.default
    return f"  [default: {shown:g}]" if setting.kind is float else f"  [default: {shown}]"


# The verbs -------------------------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="photon-grpc", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve a language model over gRPC, and talk to it.

    \b
    photon-grpc serve                        the embedded demo model on 127.0.0.1:50051
    photon-grpc serve --model ./my-model     a Hugging Face directory
    photon-grpc generate "def fib(n):"       text from a running server
    photon-grpc bench --concurrency 32       how fast a running server is
    """


EPILOG = "Every flag is also a variable: --max-num-seqs is PHOTON_MAX_NUM_SEQS; flags win. `photon-grpc doctor` shows the result."


@cli.command(cls=SettingsCommand, epilog=EPILOG)
def serve(**given: Any) -> int:
    """Serve a model until SIGTERM or Ctrl-C, then drain."""
    resolved = _resolved(given)
    _need_server()
    from photon_grpc.config.download import fetch_model
    from photon_grpc.service.supervisor import serve as serve_until_stopped

    return serve_until_stopped(fetch_model(resolved.config))


@cli.command(cls=SettingsCommand, hidden=True, epilog=EPILOG)
@click.option("--once", is_flag=True, help="On a free port, and end after the generation.")
def run(once: bool, **given: Any) -> int:
    """Serve, stream one generation to the terminal, and keep serving until Ctrl-C."""
    config = _resolved(given, quiet=True).config
    _need_server()
    from photon_grpc.cli.first_run import choose_address, first_run

    asked = "127.0.0.1:0" if once and not given["listen"] else config.server.listen[0]
    return first_run(as_flags({**given, "listen": ()}), choose_address(asked), once=once)


@cli.command(cls=SettingsCommand, epilog=EPILOG)
def doctor(**given: Any) -> None:
    """Show what `serve` would run with: settings and where they come from, versions, devices, the model."""
    from photon_grpc.cli.doctor import doctor as show

    show(_resolved(given, quiet=True))


def with_generation(function: F) -> F:
    """Flags that `generate` and `chat` share; unset ones are left to the model's defaults."""
    options = (
        click.option(
            "--target",
            envvar="PHOTON_TARGET",
            default="127.0.0.1:50051",
            show_default=True,
            metavar="ADDR",
            help="Server: HOST:PORT or unix:PATH.",
        ),
        click.option("--model", metavar="NAME", help="A model that it serves; unset: its default."),
        click.option(
            "--max-tokens",
            type=click.IntRange(1),
            metavar="N",
            help="Tokens to produce at most; unset: what the context holds.",
        ),
        click.option("--temperature", type=click.FloatRange(0), metavar="X", help="0 is greedy."),
        click.option(
            "--top-p", type=float, metavar="X", help="Draw from the likeliest tokens with this share of probability."
        ),
        click.option(
            "--top-k", type=int, metavar="N", help="Draw from this many of the likeliest tokens; -1: from all."
        ),
        click.option(
            "--min-p",
            type=click.FloatRange(0, 1),
            metavar="X",
            help="Draw from tokens at least this likely relative to the likeliest.",
        ),
        click.option("--seed", type=int, metavar="N", help="The same seed gives the same text."),
        click.option(
            "--stop", "stop_strings", multiple=True, metavar="TEXT", help="End before this text appears; repeatable."
        ),
        click.option(
            "--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Give up after so long."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@cli.command()
@click.argument("prompt")
@with_generation
@click.option("--chat", "as_chat", is_flag=True, help="The prompt is a user's message: use the model's chat template.")
@click.option("--system", metavar="TEXT", help="Instructions before the message (implies --chat).")
@click.option("--num-outputs", type=click.IntRange(1), metavar="N", help="Independent outputs of the one prompt.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object per line: deltas, then start, usage and timing.")
def generate(prompt: str, target: str, as_chat: bool, system: str | None, as_json: bool, **options: Any) -> None:
    """Stream text that continues PROMPT ('-': from stdin). Ctrl-C ends the request on the server, too."""
    from photon_grpc.cli import terminal

    text = prompt
    if prompt == "-":
        with _reading_stdin():
            text = sys.stdin.read()
    asked: Any = text
    if as_chat or system is not None:
        asked = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    try:
        asyncio.run(terminal.generate(target, asked, _only_set(options), as_json=as_json))
    except BrokenPipeError:
        # `photon-grpc generate ... | head`: whoever read has enough. Python must not flush into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@cli.command()
@with_generation
@click.option("--system", default="", metavar="TEXT", help="Instructions before the conversation.")
def chat(target: str, system: str, **options: Any) -> None:
    """Talk with the served model; /help says what else can be typed."""
    from photon_grpc.cli import terminal

    with _reading_stdin():
        terminal.chat(target, _only_set(options), system)


@cli.command()
@click.option(
    "--target",
    envvar="PHOTON_TARGET",
    default="127.0.0.1:50051",
    show_default=True,
    metavar="ADDR",
    help="Server: HOST:PORT or unix:PATH.",
)
@click.option("--model", default="", metavar="NAME", help="A model that it serves; unset: its default.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    metavar="N",
    help="Requests at a time. Unset: 16; with --rate, all that arrive.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    metavar="N",
    help="Requests in all. Unset: 4 × concurrency; with --rate, those of 10 s.",
)
@click.option(
    "--input-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Length of the prompts: random ids, each prompt its own.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens of every answer; EOS does not end it.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    metavar="R",
    help="Open loop: R requests a second on average, at random times (Poisson), whether or not earlier ones are done.",
)
@click.option(
    "--prompt-file",
    type=click.Path(),
    metavar="FILE",
    help="Texts instead of random ids, a line each, taken in turn; in a .jsonl file JSON strings, lists of ids, or "
    'objects with a "prompt".',
)
@click.option("--text/--no-text", default=True, help="Ask for text; off: for ids.  [default: on]")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Draws prompts and arrival times.")
@click.option(
    "--processes",
    type=click.IntRange(1),
    metavar="N",
    help="Client processes. Unset: one for 32 streams, at most 8 and one a core.",
)
@click.option("--json", "as_json", is_flag=True, help="The result as one JSON object; durations in seconds.")
def bench(as_json: bool, prompt_file: str | None, **options: Any) -> int:
    """Load a running server and report throughput and latencies. Greedy; the exit code is 1 when nothing was completed."""
    from pathlib import Path

    from photon_grpc.cli.bench import BenchOptions
    from photon_grpc.cli.bench import bench as run_bench

    path = Path(prompt_file) if prompt_file else None
    return run_bench(BenchOptions(prompt_file=path, **options), as_json=as_json)


# What the verbs share --------------------------------------------------------------------------------------------------


def as_flags(given: dict[str, Any]) -> list[str]:
    """The command line that says `given`, for a process of its own."""
    flags: list[str] = []
    for name, value in given.items():
        setting = by_name()[name]
        if isinstance(value, bool):
            flags.append(setting.flag if value else setting.no_flag)
        elif value is not None:
            flags += [f"{setting.flag}={each}" for each in (value if setting.many else [value])]
    return flags


def _resolved(given: dict[str, Any], *, quiet: bool = False) -> Resolved:
    try:
        resolved = resolve(given, os.environ)
    except ConfigError as error:
        raise ConfigError(f"{error} (photon-grpc serve --help)", field=error.field) from None
    for warning in () if quiet else resolved.warnings:
        _complain(f"warning: {warning}")
    return resolved


def _need_server() -> None:
    missing = [name for name in _SERVER_LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise StartupError(
            f"serving needs more than the client side ({', '.join(missing)} missing): pip install 'photon-grpc[serve]'"
        )


def _only_set(options: dict[str, Any]) -> Any:
    return {name: value for name, value in options.items() if value is not None and value != ()}


def _advice(error: PhotonError) -> str:
    if error.reason == "UNREACHABLE":
        return "\nIs a server running? `photon-grpc serve` starts one; --target says where it is."
    return f" (again in {error.retry_after_s:g} s)" if error.retry_after_s else ""


def _complain(text: str) -> None:
    print(f"photon-grpc: {text}", file=sys.stderr)
