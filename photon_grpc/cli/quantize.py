"""`quantize`: a checkpoint in 4 or 8 bits that loses little, from a text or from one that the model writes itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import click

from photon_grpc.cli.calibrate import read_text
from photon_grpc.cli.server_libraries import need_server
from photon_grpc.cli.terminal.numbers import WholeNumber

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
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    callback=_new,
    metavar="NEW",
    help="Directory to write, for serve and for other engines.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Text of the kind that the model will read. Unset: the model writes it.",
)
@click.option(
    "--num-tokens",
    type=WholeNumber(1, 2**24),
    default=16384,
    show_default=True,
    metavar="N",
    help="Tokens of the text that are read.",
)
@click.option("--format", "form", type=click.Choice(["int4-g128", "fp8-block"]), default="int4-g128", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def quantize(directory: Path, output: Path, text: Path | None, num_tokens: int, form: str, device: str) -> None:
    """Write the model in DIR with weights of 4 bits, a scale for 128 of them, or of 8 (e4m3, a scale for 128 x 128).

    The model reads a text; its weights are rounded so that what it computed for the text changes least (GPTQ). That
    loses less than serve --quantization, which rounds without a text.
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
        f"wrote {output}: {found.num_quantized} projections in {form}{left}, from {found.num_tokens:,} tokens; "
        f"{found.source_bytes / 1e6:,.1f} MB are {found.bytes / 1e6:,.1f} MB there"
    )
