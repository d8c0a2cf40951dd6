"""The verbs against a server with TLS, and `run` with TLS against itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest

from photon_grpc.cli import main
from photon_grpc.cli.terminal.connection import TLS_CA, TLS_CERT, TLS_KEY
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
def test_clear_text_to_a_tls_port_is_explained(
    authority: Authority, capsys: pytest.CaptureFixture[str], call: list[str], host: str
) -> None:
    server = authority.signed("server")
    credentials = grpc.ssl_server_credentials([(server.key.read_bytes(), server.cert.read_bytes())])
    with serving_in_a_thread(credentials=credentials) as fake:
        target = f"{host}:{fake.target.rpartition(':')[2]}"
        assert main.main([*call, "--target", target]) == 1
    assert f"{target} uses TLS: name the authority to trust with --tls-ca FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("server", "shown", "told"),
    [
        ("clear text", "a", "it does not speak TLS"),
        ("TLS", "b", "its certificate is not trusted"),
        ("TLS", "nothing", "security handshaker"),
        ("mTLS", "a", "accepts only clients with a certificate that it trusts: pass one with --tls-cert"),
    ],
)
def test_the_cause_of_a_failed_handshake_is_reported(
    authority: Authority, tmp_path: Path, server: str, shown: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    signed = authority.signed("server")
    Authority(tmp_path, "b")
    (tmp_path / "nothing.ca.pem").write_text("nothing")
    pair = [(signed.key.read_bytes(), signed.cert.read_bytes())]
    asking = grpc.ssl_server_credentials(pair, authority.cert.read_bytes(), require_client_auth=server == "mTLS")
    with serving_in_a_thread(credentials=None if server == "clear text" else asking) as fake:
        flags = ["--target", fake.target, "--tls-ca", f"{tmp_path}/{shown}.ca.pem"]
        assert main.main(["health", "--timeout", "0.5", *flags]) == 1
    said = capsys.readouterr().err
    assert told in said
    assert "Is a server running?" not in said


def test_grpc_writes_no_lines_of_its_own_between_ours(authority: Authority) -> None:
    with serving_in_a_thread() as fake:
        flags = ["--target", fake.target, "--timeout", "0.5", "--tls-ca", str(authority.cert)]
        # A process of its own: gRPC's lines come from C.
        command = [sys.executable, "-m", "photon_grpc", "health", *flags]
        done = subprocess.run(command, capture_output=True, text=True)
    first, *others = done.stderr.splitlines()
    assert first.startswith("photon-grpc: UNREACHABLE: ") and len(others) == 1, done.stderr


def test_a_server_that_answers_is_not_reported_as_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with web.accept()[0] as connection:
                        connection.recv(1024)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert main.main(["health", "--target", f"127.0.0.1:{web.getsockname()[1]}", "--timeout", "0.5"]) == 1
        web.shutdown(socket.SHUT_RDWR)
    told = capsys.readouterr().err
    assert "Is a server running?" not in told


def test_run_trusts_its_own_certificate(authority: Authority) -> None:
    done = _run(authority.signed("server"))
    assert done.returncode == 0, done.stderr
    assert "StreamGenerate" in done.stdout


def test_missing_files_are_named(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["generate", "x", "--tls-ca", "/nowhere/ca.pem"]) == 2
    assert "--tls-ca: /nowhere/ca.pem: No such file" in capsys.readouterr().err
    assert main.main(["generate", "x", "--tls-ca", "public", "--tls-cert", "c.pem"]) == 2
    assert "--tls-cert and --tls-key go together" in capsys.readouterr().err


def _run(server: Signed) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "photon_grpc", "run", "--once", "--model", str(_draft()), *server.flags]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ)


def _draft() -> Path:
    from photon_grpc import demo

    if not (demo.DRAFT / "config.json").is_file():
        pytest.skip("the embedded model is not here")
    return demo.DRAFT
