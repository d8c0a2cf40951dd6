"""The flags of `bench`, whose work is in `bench.py`, imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from photon_grpc.cli.terminal.connection import with_target
from photon_grpc.cli.terminal.numbers import Number, WholeNumber


@click.command()
@with_target
@click.option("--model", default="", metavar="NAME", help="Name of a served model. Unset: the default model.")
@click.option(
    "--concurrency",
    type=WholeNumber(1),
    metavar="N",
    help="Requests at a time. Unset: 16; with --rate, all that arrive.",
)
@click.option(
    "--requests",
    type=WholeNumber(1),
    metavar="N",
    help="Requests in all. Unset: 4 × concurrency; with --rate, those of 10 s.",
)
@click.option(
    "--input-tokens",
    type=WholeNumber(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Length of the prompts, each of different random ids.",
)
@click.option(
    "--output-tokens",
    type=WholeNumber(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens of every answer; EOS is ignored.",
)
@click.option(
    "--rate",
    type=Number(0, is_open=True),
    metavar="R",
    help="Open loop: R requests per second on average, at random times (Poisson), even if earlier ones still run.",
)
@click.option(
    "--prompt-file",
    type=click.Path(),
    metavar="FILE",
    help="Use the lines of this file in turn as prompts: texts, or in a .jsonl file JSON strings, lists of ids, or "
    'objects with a "prompt".',
)
@click.option("--text/--no-text", default=True, help="Request text, or with --no-text ids.  [default: on]")
@click.option("--logprobs", type=WholeNumber(0), metavar="N", help="Request logprobs, also of the N best tokens.")
@click.option(
    "--seed", type=WholeNumber(), default=0, show_default=True, metavar="N", help="Seed of prompts and arrival times."
)
@click.option(
    "--processes",
    type=WholeNumber(1),
    metavar="N",
    help="Client processes. Unset: one per 32 streams, at most 8 and one per core.",
)
@click.option(
    "--speculation",
    type=WholeNumber(0, 7),
    metavar="N",
    help="Most tokens that a step drafts for an answer; 0: none. Unset: as many as pay, where the server drafts.",
)
@click.option("--multiplex", is_flag=True, help="Send the requests of each client process on one stream.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Plot the distributions of the latencies (.svg, .png, .pdf; needs the extra `plot`).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object, durations in seconds.")
def bench(as_json: bool, prompt_file: str | None, **options: Any) -> int:
    """Load a running server with greedy requests; report throughput and latencies. Exit with 1 if none completed."""
    from photon_grpc.cli.bench import BenchOptions
    from photon_grpc.cli.bench import bench as run_bench

    path = Path(prompt_file) if prompt_file else None
    return run_bench(BenchOptions(prompt_file=path, **options), as_json=as_json)
