"""`trace`: a step trace of `serve --step-trace FILE` as a file that Perfetto draws."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from photon_grpc.cli.trace_lines import ALL_STEPS
from photon_grpc.errors import ConfigError


class _Steps(click.ParamType):  # type: ignore[type-arg]
    """A range of steps, FIRST:LAST, in which either number may be omitted."""

    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        first, colon, last = str(value).partition(":")
        try:
            if colon:
                return int(first or ALL_STEPS[0]), int(last or ALL_STEPS[1])
        except ValueError:
            pass
        self.fail(f"{value!r} is not FIRST:LAST, such as 100:400", param, ctx)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Unset: FILE.json."
)
@click.option(
    "--steps",
    type=_Steps(),
    default=":",
    metavar="FIRST:LAST",
    help="Steps since the server's last start in the file. Unset: all of them.",
)
def trace(file: Path, output: Path | None, steps: tuple[int, int]) -> None:
    """Write a step trace as Chrome trace events, which https://ui.perfetto.dev draws.

    The events show the steps, every sequence, tokens, KV blocks and the queue.
    """
    from photon_grpc.cli.trace_events import TraceEvents, write_events
    from photon_grpc.cli.trace_lines import read_trace

    output, events = output or file.with_name(f"{file.name}.json"), TraceEvents()
    if output.exists() and output.samefile(file):
        raise click.BadParameter(f"{output} is the step trace itself; name another file", param_hint="-o")
    head, lines = read_trace(file, steps)
    try:
        with open(output, "w", encoding="utf-8", opener=_open_for_owner) as written:
            write_events(head, events.of(lines), written)
    except ConfigError:  # half a file is of no use
        if output.is_file():
            output.unlink()
        raise
    missing = f", missing lines: {events.num_missing}" if events.num_missing else ""
    click.echo(f"wrote {output} (steps: {events.num_steps}, sequences: {events.num_sequences}{missing})")


def _open_for_owner(path: str, flags: int) -> int:
    """Create the file with the mode of a step trace: both hold ids of requests."""
    return os.open(path, flags, 0o600)
