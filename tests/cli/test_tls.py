"""The verbs against a server with TLS, and `run` with TLS against itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from photon_grpc.cli import main
from photon_grpc.cli.connection import TLS_CA, TLS_CERT, TLS_KEY
from photon_grpc.server.tls import Certificates
from photon_grpc.v1 import inference_pb2 as pb
from tests.cli.test_top import Admin
from tests.client.fake_server import message, serving_in_a_thread
from tests.server.certificates import Authority, Signed

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    for name in (TLS_CA, TLS_CERT, TLS_KEY):
        monkeypatch.setenv(name, "")  # back to what it was afterwards: flags set them
        monkeypatch.delenv(name)
    return Authority(tmp_path, "a")


def test_the_verbs_speak_tls_and_show_a_certificate(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    server, client = authority.signed("server"), authority.signed("client")
    pair = [(server.key.read_bytes(), server.cert.read_bytes())]
    asking = grpc.ssl_server_credentials(pair, authority.cert.read_bytes(), require_client_auth=True)
    script = [message("a", start=True, finish=pb.FINISH_REASON_EOS)]
    with serving_in_a_thread(script, credentials=asking) as fake:
        flags = ["--target", fake.target, "--tls-ca", str(authority.cert), *client.flags]
        assert main.main(["generate", "def ", "--max-tokens", "3", *flags]) == 0
        assert "3 tokens" in capsys.readouterr().err
        sizes = ["--requests", "2", "--concurrency", "1", "--input-tokens", "4", "--output-tokens", "2"]
        assert main.main(["bench", *sizes, *flags]) == 0
        assert "2 completed" in capsys.readouterr().out


def test_operators_verbs_speak_tls_on_a_port(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    server, client = authority.signed("server"), authority.signed("client")
    admin = Admin("127.0.0.1:0", Certificates(str(server.cert), str(server.key), str(authority.cert)))
    try:
        flags = ["--target", admin.address, "--tls-ca", str(authority.cert), *client.flags]
        assert main.main(["top", "--once", *flags]) == 0
        assert main.main(["quarantine", *flags]) == 0
        assert "nothing is in quarantine" in capsys.readouterr().out
    finally:
        admin.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("call", [["health", "--timeout", "0.5"], ["top", "--once"]], ids=lambda call: call[0])
def test_clear_text_to_a_port_that_speaks_tls_is_told(
    authority: Authority, capsys: pytest.CaptureFixture[str], call: list[str], host: str
) -> None:
    server = authority.signed("server")
    credentials = grpc.ssl_server_credentials([(server.key.read_bytes(), server.cert.read_bytes())])
    with serving_in_a_thread(credentials=credentials) as fake:
        target = f"{host}:{fake.target.rpartition(':')[2]}"
        assert main.main([*call, "--target", target]) == 1
    assert f"{target} speaks TLS: --tls-ca FILE" in capsys.readouterr().err


def test_run_believes_its_own_certificate(authority: Authority) -> None:
    done = _run(authority.signed("server"))
    assert done.returncode == 0, done.stderr
    assert "StreamGenerate" in done.stdout


def test_files_that_are_not_there_are_named(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["generate", "x", "--tls-ca", "/nowhere/ca.pem"]) == 2
    assert "--tls-ca: /nowhere/ca.pem: No such file" in capsys.readouterr().err
    assert main.main(["generate", "x", "--tls-ca", "public", "--tls-cert", "c.pem"]) == 2
    assert "--tls-cert and --tls-key go together" in capsys.readouterr().err


def _run(server: Signed) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "photon_grpc", "run", "--once", "--model", str(_draft()), *server.flags]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=110)


def _draft() -> Path:
    from photon_grpc import demo

    if not (demo.DRAFT / "config.json").is_file():
        pytest.skip("the embedded model is not here")
    return demo.DRAFT
