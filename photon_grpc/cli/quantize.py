"""`quantize`: a checkpoint in 4 bits that loses little, from a text or from one that the model writes itself."""

from __future__ import annotations

from pathlib import Path

import click

from photon_grpc.cli.calibrate import read_text
from photon_grpc.cli.server_libraries import need_server
from photon_grpc.cli.terminal.numbers import WholeNumber


def _new(context: click.Context, parameter: click.Parameter, path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise click.BadParameter(f"{path}: exists and is not an empty directory", context, parameter)
    return path


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    callback=_new,
    metavar="NEW",
    help="Directory to write, for serve NEW and for other engines (compressed-tensors, W4A16).",
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
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def quantize(directory: Path, output: Path, text: Path | None, num_tokens: int, device: str) -> None:
    """Write the model in DIR with weights of 4 bits, a scale for 128 of them.

    The model reads a text; its weights are rounded so that what it computed for the text changes least (GPTQ). That
    loses less than serve --quantization int4-g128, which rounds without a text.
    """
    need_server()
    # The command line imports neither msgspec nor torch.
    from photon_grpc.compose import quantizing

    found = quantizing.quantize(directory, output, read_text(text) if text else None, num_tokens, device)
    left = f", {len(found.ignored)} left as they are" if found.ignored else ""
    click.echo(
        f"wrote {output}: {found.num_quantized} projections in 4 bits{left}, from {found.num_tokens:,} tokens; "
        f"{found.bytes_before / 1e6:,.1f} MB are now {found.bytes_after / 1e6:,.1f} MB"
    )
