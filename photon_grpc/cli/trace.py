"""`trace`: draws what `serve --step-trace FILE` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class _Steps(click.ParamType):  # type: ignore[type-arg]
    """FIRST:LAST, either of them may be left out."""

    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        first, colon, last = str(value).partition(":")
        try:
            if colon:
                return int(first or 0), int(last or 2**63)
        except ValueError:
            pass
        self.fail(f"{value!r} is not FIRST:LAST, for example 100:400", param, ctx)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="NAME.html or NAME.svg. Unset: FILE.html.",
)
@click.option(
    "--steps", type=_Steps(), metavar="FIRST:LAST", help="Of the last start in the file; unset: its last 2000 steps."
)
def trace(file: Path, output: Path | None, steps: tuple[int, int] | None) -> None:
    """Draw a step trace: a page with a bar for every request, and below it tokens, KV blocks and the queue."""
    from photon_grpc.cli.trace_lines import read_trace
    from photon_grpc.cli.trace_picture import image, page

    output, read = output or file.with_suffix(".html"), read_trace(file, steps)
    text = image(read) if output.suffix == ".svg" else page(read, file.name)
    output.write_text(text, encoding="utf-8")
    click.echo(f"wrote {output}")
