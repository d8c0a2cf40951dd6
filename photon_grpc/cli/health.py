"""`health`: a probe for container runtimes, init systems and scripts, which answers by its exit code."""

from __future__ import annotations

import asyncio

import click

from photon_grpc.cli.terminal.connection import with_target
from photon_grpc.cli.terminal.numbers import Number

#: Added to the wait, for an answer that is on its way when the wait ends.
_ANSWER_S = 1.0


@click.command()
@with_target
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(0, is_open=True),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for it.",
)
def health(target: str, timeout_s: float) -> None:
    """Exit with 0 as soon as a server is ready to run requests, with 1 if it is not ready in time."""
    asyncio.run(_wait(target, timeout_s))


async def _wait(target: str, timeout_s: float) -> None:
    from photon_grpc.cli.terminal.connection import tls_credentials
    from photon_grpc.client import Client, Unreachable

    async with Client(target, credentials=tls_credentials(), retries=0) as client:
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_S):
                await client.wait_until_ready(timeout_s)
        except TimeoutError:
            raise Unreachable(f"no answer from {target} within {timeout_s:g} s") from None
