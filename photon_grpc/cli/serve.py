"""`serve`, `run` and `doctor`: the verbs that take every setting, each of which imports its work when it is called."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from photon_grpc.cli.first_addresses import choose_address, http_addresses, target_of
from photon_grpc.cli.server_libraries import advice_on_page, need_http, need_server
from photon_grpc.cli.terminal.settings_flags import EPILOG, SettingsCommand, as_flags, resolve_flags, warn
from photon_grpc.config.flags import ServerConfig
from photon_grpc.config.resolve import open_to_the_network
from photon_grpc.service.logs.log_lines import JsonStream


@click.command(cls=SettingsCommand, epilog=EPILOG)
def serve(**given: Any) -> int:
    """Serve a model until SIGTERM or Ctrl-C, then drain."""
    resolved = resolve_flags(given)
    if resolved.config.server.log_format == "json":
        # For the whole process, so that lines printed before the log begins, or why it does not, are JSON too.
        sys.stderr = JsonStream(sys.stderr)
    warn(resolved)
    _warn_of_open_ports(resolved.config.server)
    need_server()
    need_http(resolved.config.server)
    from photon_grpc.config.download import fetch_model
    from photon_grpc.service.processes.first_checks import check_first
    from photon_grpc.service.supervisor import serve as serve_until_stopped

    check_first(resolved.config)
    return serve_until_stopped(fetch_model(resolved.config))


@click.command(cls=SettingsCommand, epilog=EPILOG)
@click.option("--once", is_flag=True, help="Use a free port, and end after the generation.")
def run(once: bool, **given: Any) -> int:
    """Serve gRPC and HTTP, stream one generation to the terminal, and keep serving until Ctrl-C."""
    given["http_listen"] = http_addresses(given["http_listen"], once=once)
    server = resolve_flags(given).config.server
    need_server()
    need_http(server)
    if not server.http_listen:
        print(f"photon-grpc: {advice_on_page()}", file=sys.stderr)
    from photon_grpc.cli.first_run import first_run
    from photon_grpc.cli.terminal.connection import TLS_CA
    from photon_grpc.compose.console import page_urls

    if server.tls_cert:
        # It calls itself, so it trusts its own certificate unless the user names another authority.
        os.environ.setdefault(TLS_CA, server.tls_cert)

    address = choose_address("127.0.0.1:0" if once and not given["listen"] else server.listen[0])
    http = tuple(choose_address(each, "--http-listen") for each in server.http_listen)
    page = next(iter(page_urls(tuple(map(target_of, http)), has_tls=bool(server.tls_cert))), "")
    return first_run(as_flags({**given, "listen": (), "http_listen": http}), address, once=once, page=page)


@click.command(cls=SettingsCommand, epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def doctor(as_json: bool, **given: Any) -> int:
    """Show the settings of `serve` and their sources, versions, devices, the model and the addresses.

    Exit code 0: `serve` would start; 1: it would not, for the reasons shown; 2: a setting has an invalid value.
    """
    from photon_grpc.cli.doctor import doctor as show

    return show(resolve_flags(given, any_directory=True), as_json=as_json)


def _warn_of_open_ports(server: ServerConfig) -> None:
    if exposed := ", ".join(open_to_the_network(server)):
        advice = "anyone who can reach it may use it (--tls-cert, --api-keys-file)"
        print(f"photon-grpc: warning: {exposed} is served without TLS and API keys: {advice}", file=sys.stderr)
