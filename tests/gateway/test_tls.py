"""TLS of the HTTP server: versions, client certificates, certificates that change, handshakes that stall."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import ssl
from pathlib import Path

import pytest

from photon_grpc.errors import ConfigError
from photon_grpc.gateway.connections.http_server import HttpServer
from photon_grpc.gateway.connections.limits import ConnectionLimits
from photon_grpc.gateway.connections.tls import HttpCertificates
from tests.gateway.echo_server import (
    PATIENCE_S,
    EchoApp,
    answer_to,
    connect,
    get,
    opened,
    post,
    status,
    to_the_end,
    until,
)
from tests.server.certificates import Authority, Signed

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")

CLOSE = b"Connection: close\r\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def ours(made: Path) -> Authority:
    return Authority(made, "ours")


@pytest.fixture(scope="module")
def theirs(made: Path) -> Authority:
    return Authority(made, "theirs")


@pytest.fixture(scope="module")
def signed(ours: Authority) -> Signed:
    return ours.signed("server")


@pytest.fixture(scope="module")
def other(theirs: Authority) -> Signed:
    return theirs.signed("other")


def trusting(authority: Authority, client: Signed | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.cert))
    context.set_alpn_protocols(["h2", "http/1.1"])
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    return context


async def ask(port: int, context: ssl.SSLContext, data: bytes = b"") -> bytes:
    """Return the answer over TLS. Raise OSError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(data or get(more=CLOSE))
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        writer.close()


@pytest.fixture
def app() -> EchoApp:
    return EchoApp()


async def test_requests_over_tls(app: EchoApp, ours: Authority, signed: Signed) -> None:
    certificates = HttpCertificates(str(signed.cert), str(signed.key))
    async with opened(app, certificates=certificates) as port:
        assert status(await ask(port, trusting(ours))) == 200
        assert status(await ask(port, trusting(ours), post(b"x" * 500_000, more=CLOSE))) == 200
        # Its own page is https.
        assert status(await ask(port, trusting(ours), get(more=CLOSE + b"Origin: https://localhost\r\n"))) == 200
        assert status(await ask(port, trusting(ours), get(more=CLOSE + b"Origin: http://localhost\r\n"))) == 403
    assert len(app.seen[1].body) == 500_000


async def test_a_refusal_is_read_over_tls(app: EchoApp, ours: Authority, signed: Signed) -> None:
    certificates = HttpCertificates(str(signed.cert), str(signed.key))
    limits = ConnectionLimits(linger_s=0.2)
    async with opened(app, certificates=certificates, limits=limits, max_body_bytes=100) as port:
        assert status(await ask(port, trusting(ours), post(b"x" * 100_000))) == 413


async def test_only_tls_1_2_and_later_and_only_http_1(app: EchoApp, ours: Authority, signed: Signed) -> None:
    certificates = HttpCertificates(str(signed.cert), str(signed.key))
    assert certificates.context().minimum_version == ssl.TLSVersion.TLSv1_2
    async with opened(app, certificates=certificates) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(ours))
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        writer.close()


async def test_a_client_needs_a_certificate_of_the_client_ca(
    app: EchoApp, ours: Authority, theirs: Authority, signed: Signed, other: Signed
) -> None:
    certificates = HttpCertificates(str(signed.cert), str(signed.key), str(theirs.cert))
    async with opened(app, certificates=certificates) as port:
        for client in (None, signed):
            answer = b""
            with contextlib.suppress(OSError):
                answer = await ask(port, trusting(ours, client))
            assert answer == b""
        assert not app.seen
        assert status(await ask(port, trusting(ours, other))) == 200


async def test_certificates_are_read_again_when_they_change(
    app: EchoApp,
    ours: Authority,
    theirs: Authority,
    signed: Signed,
    other: Signed,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cert, key = tmp_path / "s.pem", tmp_path / "s.key"
    shutil.copy(signed.cert, cert)
    shutil.copy(signed.key, key)
    certificates = HttpCertificates(str(cert), str(key), check_interval_s=0.0)
    async with opened(app, certificates=certificates) as port:
        assert status(await ask(port, trusting(ours))) == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(ours))
        with caplog.at_level(logging.INFO):
            cert.write_bytes(other.cert.read_bytes()[:200])  # half written
            assert status(await ask(port, trusting(ours))) == 200
            assert "stay in force" in caplog.text
            shutil.copy(other.cert, cert)
            shutil.copy(other.key, key)
            assert status(await ask(port, trusting(theirs))) == 200
        with pytest.raises(ssl.SSLError):
            await ask(port, trusting(ours))
        writer.write(get(more=CLOSE))  # a connection from before
        assert status(await reader.read()) == 200
        writer.close()


async def test_files_are_looked_at_once_per_interval(signed: Signed, tmp_path: Path) -> None:
    cert = tmp_path / "s.pem"
    shutil.copy(signed.cert, cert)
    certificates = HttpCertificates(str(cert), str(signed.key), check_interval_s=3600.0)
    before = certificates.context()
    os.utime(cert, ns=(1, 1))
    assert certificates.context() is before


def test_unusable_files_are_named(signed: Signed, other: Signed, tmp_path: Path) -> None:
    for cert, key in ((signed.cert, other.key), (signed.cert, tmp_path / "none"), (signed.key, signed.key)):
        with pytest.raises(ConfigError, match="--tls-"):
            HttpCertificates(str(cert), str(key))


async def test_a_handshake_that_stalls_is_ended_and_counted(
    app: EchoApp, ours: Authority, signed: Signed, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = HttpCertificates(str(signed.cert), str(signed.key))
    limits = ConnectionLimits(handshake_timeout_s=0.2, max_connections=2)
    async with opened(app, certificates=certificates, limits=limits) as port:
        readers = [(await connect(port))[0] for _ in range(3)]
        # The third took the place of the first.
        assert await to_the_end(readers[0]) == b""
        assert status(await ask(port, trusting(ours))) == 200
        for reader in readers[1:]:
            assert await to_the_end(reader) == b""
        assert status(await ask(port, trusting(ours))) == 200
    assert not [record for record in caplog.records if record.name != "asyncio" or record.levelno > logging.DEBUG]


async def test_a_handshake_that_fails_leaves_no_place_taken(app: EchoApp, signed: Signed) -> None:
    server = HttpServer(app, certificates=HttpCertificates(str(signed.cert), str(signed.key)))
    (address,) = await server.start(["127.0.0.1:0"], reuse_port=False)
    for data in (b"", get()):
        _, writer = await connect(int(address.rpartition(":")[2]))
        await until(lambda: server.num_connections == 1)
        writer.write(data)
        writer.close()
        await until(lambda: server.num_connections == 0)
    await server.stop(0.0)


async def test_clear_text_on_a_tls_port_is_closed(app: EchoApp, signed: Signed) -> None:
    certificates = HttpCertificates(str(signed.cert), str(signed.key))
    async with opened(app, certificates=certificates) as port:
        assert b"HTTP" not in await answer_to(port, get())
    assert not app.seen


async def test_the_app_is_told_when_a_client_leaves(app: EchoApp, ours: Authority, signed: Signed) -> None:
    certificates = HttpCertificates(str(signed.cert), str(signed.key))
    async with opened(app, certificates=certificates) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(ours))
        writer.write(get("/wait"))
        async with asyncio.timeout(PATIENCE_S):
            await app.arrived.wait()
            writer.close()
            await app.left.wait()
