"""`health`: the probe of container runtimes, init systems and scripts. Its answer is the exit code."""

from __future__ import annotations

import asyncio

import click

from photon_grpc.cli.terminal.connection import with_target

#: On top of the wait, for an answer that is under way at its end.
_ANSWER_S = 1.0


@click.command()
@with_target
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait so long until it is ready.",
)
def health(target: str, timeout_s: float) -> None:
    """Exit with 0 as soon as a server is ready: a request sent now would run. Exit with 1 if it is not in time."""
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
