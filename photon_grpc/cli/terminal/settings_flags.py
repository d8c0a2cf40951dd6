"""Flags of all settings: derived from `config`, resolved by it, and written out again for another process."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from photon_grpc.config.resolve import Resolved, resolve
from photon_grpc.config.settings import Setting, by_name, settings
from photon_grpc.errors import ConfigError

EPILOG = (
    "Every flag is also a variable: --max-num-seqs is PHOTON_MAX_NUM_SEQS; flags override variables. "
    "`photon-grpc doctor` shows the result."
)


_POSITIONAL = "positional_model"
#: Heading of options that are no settings.
_OWN_TITLE = "Options"

#: Flags of vLLM that have another name here, or none.
_ELSEWHERE = {
    "--host": "use --listen HOST:PORT for gRPC, --http-listen HOST:PORT for HTTP",
    "--port": "use --listen HOST:PORT for gRPC, --http-listen HOST:PORT for HTTP",
    "--allowed-origins": "use --http-allowed-origin ORIGIN, one flag for each",
    "--api-key": "use --api-keys-file FILE",
}


class SettingOption(click.Option):
    """A flag made from a Setting. It passes its text on unchecked; only `resolve` knows the allowed values."""

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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the shell's completions: the choices, or file names if the setting is a file or directory."""
        setting = self.setting
        if setting.choices:
            return [CompletionItem(choice) for choice in setting.choices if choice.startswith(incomplete)]
        takes = {"FILE": "file", "DIR": "dir", "DIR_OR_ID": "dir"}.get(setting.metavar)
        return [CompletionItem(incomplete, type=takes)] if takes else []

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Shorten the two spellings of a switch to `--[no-]enforce-eager`."""
        record = super().get_help_record(ctx)
        is_switch = self.setting.kind is bool and record is not None
        return (f"--[no-]{self.setting.flag[2:]}", record[1]) if is_switch and record else record


class _ModelArgument(click.Argument):
    """The model, as the command's only argument."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return its row, which click shows in some versions only."""
        return str(self.metavar), "The same as --model."


class SettingsCommand(click.Command):
    """A command with the model as its argument and every setting as a flag, grouped as in `config/flags.py`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            _ModelArgument([_POSITIONAL], required=False, metavar="[DIR_OR_ID]", shell_complete=_directories)
        ]
        self.params += [SettingOption(setting) for setting in settings()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with `serve DIR_OR_ID` as `serve --model DIR_OR_ID`."""
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _ELSEWHERE:
                raise
            raise click.UsageError(
                f"No such option: {error.option_name}; {_ELSEWHERE[error.option_name]}", ctx
            ) from None
        positional = ctx.params.pop(_POSITIONAL, None)
        if positional is not None:
            if ctx.params["model"] not in (None, positional):
                raise click.UsageError(f"two models: {positional} and --model {ctx.params['model']}; give one", ctx)
            ctx.params["model"] = positional
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {_OWN_TITLE: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(_title(param), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=34)


def _title(param: click.Parameter) -> str:
    """Return the heading of a parameter: that of its setting, or of the command's own options."""
    if isinstance(param, SettingOption):
        return param.setting.title
    return by_name()["model"].title if isinstance(param, _ModelArgument) else _OWN_TITLE


def _directories(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


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


def as_flags(given: dict[str, Any]) -> list[str]:
    """Return the command line of these settings, for another process."""
    flags: list[str] = []
    for name, value in given.items():
        setting = by_name()[name]
        if isinstance(value, bool):
            flags.append(setting.flag if value else setting.no_flag)
        elif value is not None:
            flags += [f"{setting.flag}={each}" for each in (value if setting.many else [value])]
    return flags


def resolve_flags(given: dict[str, Any], *, any_directory: bool = False) -> Resolved:
    """Resolve the flags. Raise ConfigError; with `any_directory` accept a directory without a model."""
    try:
        return resolve(given, os.environ, any_directory=any_directory)
    except ConfigError as error:
        raise ConfigError(f"{error} (photon-grpc serve --help)", field=error.field) from None


def warn(resolved: Resolved) -> None:
    """Print the warnings on stderr."""
    for warning in resolved.warnings:
        print(f"photon-grpc: warning: {warning}", file=sys.stderr)
