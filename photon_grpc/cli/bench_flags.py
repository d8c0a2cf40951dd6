"""The flags of `bench`, whose work is in `bench.py`, imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from photon_grpc.cli.terminal.connection import with_target
from photon_grpc.cli.terminal.numbers import Number, WholeNumber, whole_number


@click.command()
@with_target
@click.option("--model", default="", metavar="NAME", help="Name of a served model. Unset: the default model.")
@whole_number("--concurrency", "Requests at a time. Unset: 16; with --rate, all that arrive.")
@whole_number("--requests", "Requests in all. Unset: 4 × concurrency; with --rate, those of 10 s.")
@whole_number("--input-tokens", "Length of the prompts, each of different random ids.", default=128)
@whole_number("--output-tokens", "Tokens of every answer; EOS is ignored.", default=128)
@click.option(
    "--rate",
    type=Number(0, is_open=True),
    metavar="R",
    help="Open loop: R requests per second on average, at random times (Poisson), even if earlier ones still run.",
)
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Use the lines of this file in turn as prompts: texts, or in a .jsonl file JSON strings, lists of ids, or "
    'objects with a "prompt".',
)
@click.option("--text/--no-text", default=True, help="Request text, or with --no-text ids.  [default: on]")
@whole_number("--logprobs", "Request logprobs, also of the N best tokens.", WholeNumber(0))
@whole_number("--seed", "Seed of prompts and arrival times.", WholeNumber(), default=0)
@whole_number("--processes", "Client processes. Unset: one per 32 streams, at most 8 and one per core.")
@whole_number(
    "--speculation",
    "Most tokens that a step drafts for an answer; 0: none. Unset: as many as pay, where the server drafts.",
    WholeNumber(0, 7),
)
@click.option("--multiplex", is_flag=True, help="Send the requests of each client process on one stream.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Plot the distributions of the latencies (.svg, .png, .pdf; needs the extra `plot`).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object, durations in seconds.")
def bench(as_json: bool, **options: Any) -> int:
    """Load a running server with greedy requests; report throughput and latencies. Exit with 1 if none completed."""
    from photon_grpc.cli.bench import BenchOptions
    from photon_grpc.cli.bench import bench as run_bench

    return run_bench(BenchOptions(**options), as_json=as_json)
