"""One service with the embedded model for every test here: started as a user starts it, stopped as a user stops it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from photon_grpc import demo
from photon_grpc.cli.first_run import choose_address
from photon_grpc.client import SyncClient


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running service."""
    if not (demo.TARGET / "config.json").is_file():
        pytest.skip("the embedded model is not here")
    address = choose_address("127.0.0.1:0")
    log = tmp_path_factory.mktemp("service") / "log"
    with log.open("w") as out, subprocess.Popen(_serve(address), stderr=out) as service:
        try:
            _wait(service, address, log)
            yield address
        finally:
            service.terminate()
            code = service.wait()
    assert code == 0, log.read_text()


def _serve(address: str) -> list[str]:
    return [sys.executable, "-m", "photon_grpc", "serve", "--listen", address]


def _wait(service: subprocess.Popen[bytes], address: str, log: Path) -> None:
    with SyncClient(address) as client:
        try:
            client.wait_until_ready(90)
        except Exception as error:
            pytest.fail(f"{error}; exit code {service.poll()}\n{log.read_text()}")
