"""The HTTP server in the processes of a service: its addresses, the pages of the supervisor, and the common drain."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.running import RunningService, client, modelless, wait_until
from tests.service.tiny import write_tiny_model


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    tiny = ["--model", str(write_tiny_model(tmp_path / "tiny")), "--load-format", "dummy", "--num-blocks", "4096"]
    flags = [*tiny, "--frontends", "2", "--http-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    with modelless(*flags) as running:
        running.wait_ready()
        yield running


def http_addresses(service: RunningService) -> list[str]:
    return re.findall(r"http://(\S+?)/", service.ready_lines()[-1])


def got(address: str, path: str, accept: str = "*/*") -> tuple[int, str, str]:
    """Return status, content type and body.

    A front end that has drained before another closes the connections that the system gave it and it did not take yet.
    """
    for _ in range(10):
        with contextlib.suppress(ConnectionResetError):
            return _got(address, path, accept)
    raise AssertionError("every connection was reset")


def _got(address: str, path: str, accept: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path, headers={"Accept": accept})
    answer = connection.getresponse()
    try:
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


WITHOUT_HTTP = """
from photon_grpc.compose.http_api import NoHttpApi, http_api
from photon_grpc.service.processes import frontend
assert isinstance(http_api((), None), NoHttpApi)
"""
SUPERVISOR_WITH_HTTP = """
from photon_grpc.config.flags import ServeConfig, ServerConfig
from photon_grpc.service.supervisor import Supervisor
service = Supervisor(ServeConfig(server=ServerConfig(http_listen=("127.0.0.1:0",))))
assert service._metrics.page("/metrics", "").status == 200
"""


@pytest.mark.parametrize("program", [WITHOUT_HTTP, SUPERVISOR_WITH_HTTP], ids=["front end", "supervisor"])
def test_a_process_without_a_server_loads_nothing_of_it(program: str) -> None:
    shown = f"{program}\nimport sys\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True).stdout.split()
    assert "photon_grpc.bridge.control" in loaded
    assert {"starlette", "uvicorn", "httptools", "anyio", "photon_grpc.gateway"}.isdisjoint(loaded)


def test_pages_answer_at_every_address_also_after_a_restart_and_until_the_drain_ends(service: RunningService) -> None:
    addresses = http_addresses(service)
    assert len(set(addresses)) == 2
    for address in addresses * 4:  # connections go to either front end
        assert got(address, "/health")[::2] == got(address, "/readyz")[::2] == (200, "SERVING\n")
        assert got(address, "/healthz")[::2] == (200, "SERVING\n")
    assert got(addresses[0], "/none")[0] == 404
    _assert_counts(service, addresses[0])
    _assert_same_addresses_after_a_restart(service, addresses)
    _assert_drained_together(service, addresses[0])


def _assert_counts(service: RunningService, address: str) -> None:
    """Without --metrics-listen the requests are counted all the same."""
    with client(service.wait_ready()[0]) as calls:
        calls.generate()

    def is_counted() -> bool:
        return 'photon_request_success_total{finished_reason="max_tokens"} 1.0' in got(address, "/metrics")[2]

    wait_until(is_counted, "the request is counted", limit_s=60.0)
    _, content_type, page = got(address, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith("# EOF\n")
    assert "photon_frontends 2.0" in page


def _assert_same_addresses_after_a_restart(service: RunningService, addresses: list[str]) -> None:
    times = len(service.ready_lines())
    os.kill(service.children()["frontend"], signal.SIGKILL)
    service.wait_ready(times + 1)
    assert http_addresses(service) == addresses
    assert {got(address, "/readyz")[0] for address in addresses * 4} == {200}


def _assert_drained_together(service: RunningService, address: str) -> None:
    """Streams of both servers run out in one drain; until then the server answers, and refuses what is new."""
    with client(service.wait_ready()[0]) as calls:
        over_grpc, over_http = calls.stream(max_tokens=2000), posted(address, max_tokens=2000, stream=True)
        next(over_grpc)
        assert over_http.readline().startswith(b"data: {")
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: got(address, "/readyz")[::2] == (503, "NOT_SERVING\n"), "the drain", limit_s=60.0)
        assert got(address, "/healthz")[::2] == (200, "SERVING\n")
        refused = posted(address, max_tokens=1, stream=False)
        assert (refused.status, json.load(refused)["error"]["code"]) == (503, "DRAINING")
        assert refused.headers["Connection"] == "close" and int(refused.headers["Retry-After"]) > 0
        assert over_http.read().endswith(b"data: [DONE]\n\n")
        assert sum(1 for _ in over_grpc) > 0
    assert service.process.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        got(address, "/healthz")


def posted(address: str, *, max_tokens: int, stream: bool) -> http.client.HTTPResponse:
    """Return the answer of /v1/completions once its head has arrived."""
    connection = http.client.HTTPConnection(address, timeout=100)
    body = {"prompt": "def", "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()
