"""`keys`: new API keys, of which the server stores the digests only."""

from __future__ import annotations

import hashlib
import json
import re
import secrets

import click

from photon_grpc.cli.terminal.numbers import WholeNumber

#: Scanners that look for secrets in source code recognize it.
_PREFIX = "photon-"
_SECRET_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCOPE = re.compile(r"generate|models|admin|service:[A-Za-z_][A-Za-z0-9_.]*")


def _checked(scopes: tuple[str, ...]) -> tuple[str, ...]:
    for scope in scopes:
        if not _SCOPE.fullmatch(scope):
            raise click.BadParameter(f"{scope!r} is not one of generate, models, admin, service:FULL.NAME")
    return scopes


@click.group()
def keys() -> None:
    """Make API keys."""


@keys.command()
@click.argument("name", default="")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    callback=lambda context, parameter, scopes: _checked(scopes),
    metavar="SCOPE",
    default=("generate", "models"),
    show_default=True,
    help="What it may call: generate, models, admin, or service:FULL.NAME of a service of --service; repeatable.",
)
@click.option("--max-concurrent", type=WholeNumber(1), metavar="N", help="Requests in flight. Unset: no limit.")
@click.option(
    "--tokens-per-minute", type=WholeNumber(1), metavar="N", help="Prompt and output tokens. Unset: no limit."
)
@click.option("--weight", type=WholeNumber(1, 1000), metavar="N", help="Share while other keys wait, too. Unset: 1.")
def new(
    name: str, scopes: tuple[str, ...], max_concurrent: int | None, tokens_per_minute: int | None, weight: int | None
) -> None:
    """Write the block of a new key for the file of `serve --api-keys-file`; show the key once, on stderr."""
    if name and not _NAME.fullmatch(name):
        raise click.BadParameter(f"{name!r}: letters, digits, '.', '_' and '-', 64 at most", param_hint="NAME")
    secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    entry = {
        "name": name or f"key-{secrets.token_hex(4)}",
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "scopes": list(scopes),
        "max_concurrent": max_concurrent,
        "tokens_per_minute": tokens_per_minute,
        "weight": weight,
    }
    # stdout may be the file itself.
    text = f"The key, shown only once; calls send it as metadata `authorization: Bearer KEY`:\n\n    {secret}\n"
    click.echo(f"{text}\nIts block for the file of --api-keys-file, on stdout:\n", err=True)
    click.echo("[[key]]")
    # Texts, numbers and lists of ASCII are the same in JSON and TOML.
    for field, value in entry.items():
        if value is not None:
            click.echo(f"{field} = {json.dumps(value)}")
