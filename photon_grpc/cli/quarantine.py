"""`quarantine`: the requests that crashed an engine, or may have, and their release."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import click

from photon_grpc.cli.terminal.connection import (
    admin_connection,
    check_target,
    only_admin_service,
    with_admin_target,
    with_tls,
)
from photon_grpc.errors import ConfigError

if TYPE_CHECKING:
    from photon_grpc.client.admin import AdminClient, QuarantineEntry

_COLUMNS = ("fingerprint", "state", "crashes", "last crash", "expires in", "key", "request")


@click.command()
@with_admin_target
@click.option("--clear", "cleared", multiple=True, metavar="FINGERPRINT", help="Remove this request; repeatable.")
@click.option("--clear-all", is_flag=True, help="Remove all of them.")
@with_tls
def quarantine(target: str | None, cleared: tuple[str, ...], clear_all: bool) -> None:
    """List or clear the requests that crashed the engine (refused) or may have (suspects, run alone once)."""
    if cleared and clear_all:
        raise ConfigError("--clear and --clear-all: choose one")
    target = check_target(target) if target else only_admin_service()
    if cleared or clear_all:
        asyncio.run(_clear(target, None if clear_all else cleared))
    else:
        asyncio.run(_list(target))


async def _clear(target: str, fingerprints: tuple[str, ...] | None) -> None:
    """Clear all that the server knows, then raise ConfigError if there are others."""
    async with _admin(target) as client:
        known = await client.clear_quarantine(fingerprints)
    for each in known:
        click.echo(f"cleared {each}")
    unknown = [each for each in fingerprints or () if each not in known]
    if unknown:
        raise ConfigError(f"{target} knows no request {', '.join(unknown)}")
    if not known:
        click.echo("nothing was in quarantine")


async def _list(target: str) -> None:
    async with _admin(target) as client:
        suspects = await client.quarantine()
    if not suspects:
        return click.echo("nothing is in quarantine")
    rows = [_COLUMNS, *map(_row, suspects)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _admin(target: str) -> AdminClient:
    from photon_grpc.client.admin import AdminClient

    return AdminClient(target, **admin_connection(target))


def _row(suspect: QuarantineEntry) -> tuple[str, ...]:
    return (
        suspect.fingerprint,
        "quarantined" if suspect.is_quarantined else "suspect",
        str(suspect.num_crashes),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(suspect.crashed_at_s)),
        f"{suspect.left_s / 60:.0f} min",
        suspect.api_key_name or "-",
        suspect.request_id or "-",
    )
