"""A service with the embedded model for all tests here, started and stopped as a user does it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from photon_grpc import demo
from photon_grpc.cli.first_addresses import choose_address
from photon_grpc.client import SyncClient


@dataclass(frozen=True)
class Service:
    """A running service: the addresses of it and of its AdminService."""

    address: str
    admin_socket: Path


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    if not (demo.TARGET / "config.json").is_file():
        pytest.skip("the embedded model is not here")
    directory = tmp_path_factory.mktemp("service")
    running = Service(choose_address("127.0.0.1:0"), directory / "admin.sock")
    log = directory / "log"
    with log.open("w") as out, subprocess.Popen(_serve(running), stderr=out) as process:
        try:
            _wait(process, running.address, log)
            yield running
        finally:
            process.terminate()
            code = process.wait()
    assert code == 0, log.read_text()


@pytest.fixture(scope="session")
def target(service: Service) -> str:
    """Return the address of a running service."""
    return service.address


def _serve(service: Service) -> list[str]:
    command = [sys.executable, "-m", "photon_grpc", "serve", "--listen", service.address]
    return [*command, "--admin-listen", f"unix:{service.admin_socket}"]


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    with SyncClient(address) as client:
        try:
            client.wait_until_ready(90)
        except Exception as error:
            pytest.fail(f"{error}; exit code {process.poll()}\n{log.read_text()}")
