"""`calibrate`: scales for --kv-cache-dtype fp8, from a text, into a file that `serve` finds."""

from __future__ import annotations

from pathlib import Path

import click

from photon_grpc.cli.server_libraries import need_server
from photon_grpc.cli.terminal.text_options import read_text, reads_a_text


def _writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"{path}: its directory does not exist", context, parameter)
    return path


@click.command()
@reads_a_text("Python's own language reference.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_writable,
    metavar="FILE",
    help="File to write, for --kv-calibration. Unset: kv_scales.json in DIR, which serve finds.",
)
def calibrate(directory: Path, text: Path | None, output: Path | None, num_tokens: int, device: str) -> None:
    """Write scales for the 8-bit KV cache of the model in DIR.

    The model reads a text once. Every layer and head gets one scale for its keys and one for its values, with room for
    numbers twice as large as the largest seen. serve --kv-cache-dtype fp8 uses them if the checkpoint has none.
    """
    need_server()
    # The command line imports neither msgspec nor torch.
    from photon_grpc.compose import calibration
    from photon_grpc.config.kv_calibration import FILE, write_calibration

    found = calibration.calibrate(
        directory, read_text(text) if text else calibration.default_text(), num_tokens, device
    )
    path = output or directory / FILE
    write_calibration(found.scales, path)
    layers, heads = len(found.scales.keys), len(found.scales.keys[0])
    click.echo(
        f"wrote {path}: scales for {layers} layers of {heads} heads, from {found.scales.num_tokens:,} tokens; "
        f"largest key {found.largest_key:.3g}, largest value {found.largest_value:.3g}"
    )
