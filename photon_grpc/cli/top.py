"""`top`: a server's load, live in the terminal."""

from __future__ import annotations

import asyncio
import sys

import click

from photon_grpc.cli.terminal.connection import check_target, only_admin_service, with_admin_target, with_tls
from photon_grpc.cli.terminal.numbers import Number
from photon_grpc.errors import ConfigError


@click.command()
@with_admin_target
@click.option(
    "--interval",
    "interval_s",
    type=Number(0.1, 60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between updates.",
)
@click.option("--once", is_flag=True, help="Print the load once, as text; needs no terminal.")
@with_tls
def top(target: str | None, interval_s: float, once: bool) -> None:
    """Show a server's load live: requests, KV blocks, tokens per second, cache hits, steps. Ctrl-C stops."""
    from photon_grpc.cli.terminal.watching import look, watch

    target = check_target(target) if target else only_admin_service()
    if once:
        return asyncio.run(look(target))
    if not sys.stdout.isatty():
        raise ConfigError("top needs a terminal; --once prints the load once, as text")
    try:
        asyncio.run(watch(target, interval_s))
        click.echo(f"the server at {target} has stopped")
    except KeyboardInterrupt:
        click.echo(f"the server at {target} keeps running")
