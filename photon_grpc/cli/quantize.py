"""`quantize`: write a checkpoint in 4 or 8 bits, rounded to fit a text that is given or that the model writes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import click

from photon_grpc.cli.server_libraries import need_server
from photon_grpc.cli.terminal.text_options import read_text, reads_a_text

#: Ids of a text that the model writes.
OWN_LENGTH = 384


def _new(context: click.Context, parameter: click.Parameter, path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise click.BadParameter(f"{path}: exists and is not an empty directory", context, parameter)
    return path


def own_text(directory: Path, num_tokens: int, device: str) -> list[Sequence[int]]:
    """Return what the model writes behind random ids, at temperature 1."""
    from photon_grpc import LLM
    from photon_grpc.config.model_dir import read_model_dir

    config, number = read_model_dir(directory), random.Random(0)
    length = min(OWN_LENGTH, config.max_position_embeddings - 2)
    prompts = [[number.randrange(config.vocab_size)] for _ in range(max(1, num_tokens // (length + 1)))]
    with LLM(str(directory), device=device, max_num_seqs=32) as llm:
        found = llm.generate(prompts, max_tokens=length, temperature=1.0, seed=0, ignore_eos=True)
    return [[*prompt, *one.token_ids] for prompt, one in zip(prompts, found, strict=True)]


@click.command()
@reads_a_text("the model writes it.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    callback=_new,
    metavar="NEW",
    help="Directory to write, for serve and for other engines.",
)
@click.option("--format", "form", type=click.Choice(["int4-g128", "fp8-block"]), default="int4-g128", show_default=True)
def quantize(directory: Path, output: Path, text: Path | None, num_tokens: int, form: str, device: str) -> None:
    """Write the model in DIR with 4-bit weights in groups of 128, or FP8 weights in blocks of 128 x 128.

    The model reads a text, and its weights are rounded so that its results for that text change least (GPTQ). This
    loses less quality than serve --quantization, which rounds without a text.
    """
    need_server()
    # The command line imports neither msgspec nor torch.
    from photon_grpc.compose import quantizing

    quantizing.check(directory)
    pieces = quantizing.pieces_of(directory, read_text(text), num_tokens) if text else []
    # Before what takes long.
    output.mkdir(parents=True, exist_ok=True)
    pieces = pieces or own_text(directory, num_tokens, device)
    found = quantizing.quantize(directory, output, pieces, device, form)
    left = f", {len(found.ignored)} left as they are" if found.ignored else ""
    click.echo(
        f"wrote {output}: {found.num_quantized} projections in {form}{left}, rounded to fit {found.num_tokens:,} "
        f"tokens; {found.bytes / 1e6:,.1f} MB instead of {found.source_bytes / 1e6:,.1f} MB"
    )
