"""`service explain`: the prompt of a call of an operator's own service, before anything is served."""

from __future__ import annotations

import click

from photon_grpc.cli.server_libraries import need_server
from photon_grpc.cli.terminal.settings_flags import resolve_flags
from photon_grpc.errors import ConfigError


@click.group()
def service() -> None:
    """Look at your own services, as `serve --service` serves them."""


@service.command()
@click.argument("method", metavar="FILE:SERVICE.METHOD")
@click.option("--request", default="{}", metavar="JSON", help="The request as proto3 JSON. Unset: an empty one.")
@click.option("--model", metavar="DIR", help="Model directory with the chat template. Unset: the embedded demo model.")
@click.option("--proto-path", multiple=True, metavar="DIR", help="Where a .proto file looks for its imports.")
def explain(method: str, request: str, model: str | None, proto_path: tuple[str, ...]) -> None:
    """Print the prompt that a model gets for a request."""
    path, _, name = method.rpartition(":")
    if not path or "." not in name:
        raise ConfigError(f"{method}: write FILE:full.name.of.Service.Method")
    need_server()
    from photon_grpc.compose.other_services import explained

    config = resolve_flags({"model": model, "proto_path": proto_path}).config
    click.echo(explained(path, name, request, config))
