"""TLS over real sockets: admission, certificates that change under open streams, unusable files."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from photon_grpc.client import Client
from photon_grpc.config.flags import ServerConfig
from photon_grpc.config.resolve import resolve
from photon_grpc.errors import ConfigError
from photon_grpc.server.server import Server
from photon_grpc.server.tls import Certificates
from tests.server.certificates import Authority, Signed
from tests.server.fake_frontend import ASK, GENERATE, HELLO, STREAM_GENERATE, FakeFrontend, raw, serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


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
def other(ours: Authority) -> Signed:
    return ours.signed("other")


@pytest.fixture
def server(ours: Authority, tmp_path: Path) -> Signed:
    """Return copies of the certificates, which a test may change."""
    signed = ours.signed("server")
    return Signed(signed.cert.rename(tmp_path / "s.pem"), signed.key.rename(tmp_path / "s.key"))


@pytest.fixture(params=["TLS", "mTLS"])
def client_ca(request: pytest.FixtureRequest, ours: Authority) -> str:
    return str(ours.cert) if request.param == "mTLS" else ""


@pytest.fixture
async def address(frontend: FakeFrontend, server: Signed, client_ca: str) -> AsyncIterator[str]:
    certificates = Certificates(str(server.cert), str(server.key), client_ca)
    async with serving(frontend, certificates=certificates) as bound:
        yield bound


async def answers(address: str, credentials: grpc.ChannelCredentials | None) -> bool:
    """Make a call on its own connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options)
    async with channel:
        try:
            await raw(channel, GENERATE)(ASK.SerializeToString(), timeout=120)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
    return True


def serial(address: str) -> bytes:
    """Return the certificate that a handshake presents now."""
    host, _, port = address.rpartition(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)))) if port else b""


async def test_clients_are_admitted_by_their_certificates(
    frontend: FakeFrontend, address: str, client_ca: str, ours: Authority, theirs: Authority, other: Signed
) -> None:
    stranger = theirs.signed("stranger")
    assert await answers(address, ours.trusted(other))
    assert await answers(address, ours.trusted()) is not bool(client_ca)
    assert await answers(address, ours.trusted(stranger)) is not bool(client_ca)
    assert not await answers(address, theirs.trusted(other))
    assert not await answers(address, None)
    assert len(frontend.asks) == (1 if client_ca else 3)


async def test_the_client_takes_credentials(address: str, ours: Authority, other: Signed) -> None:
    async with Client(address, credentials=ours.trusted(other)) as client:
        assert (await client.generate("hi")).text == "hello!"


@pytest.mark.parametrize("client_ca", ["TLS"], indirect=True)
async def test_a_new_certificate_applies_from_the_next_handshake_and_ends_no_stream(
    frontend: FakeFrontend, address: str, ours: Authority, server: Signed, other: Signed
) -> None:
    gate = asyncio.Event()
    frontend.script = (HELLO[0], gate.wait, *HELLO[1:])
    async with grpc.aio.secure_channel(address, ours.trusted()) as channel:
        call = raw(channel, STREAM_GENERATE, stream=True)(ASK.SerializeToString())
        messages = call.__aiter__()
        assert await anext(messages)
        before = await asyncio.to_thread(serial, address)
        other_cert = ssl.PEM_cert_to_DER_cert(other.cert.read_text())
        shutil.copy(other.cert, server.cert)  # half of a change: the key is still the old one
        assert await asyncio.to_thread(serial, address) == before != other_cert
        shutil.copy(other.key, server.key)
        assert await asyncio.to_thread(serial, address) == other_cert
        gate.set()
        frontend.script = HELLO
        assert len([message async for message in messages]) == 2
        assert await call.code() is grpc.StatusCode.OK
    assert await answers(address, ours.trusted())


async def test_a_new_client_authority_applies_from_the_next_handshake(
    frontend: FakeFrontend, ours: Authority, theirs: Authority, server: Signed, other: Signed, tmp_path: Path
) -> None:
    believed = Path(shutil.copy(ours.cert, tmp_path / "ca.pem"))
    stranger = theirs.signed("stranger")
    async with serving(
        frontend, certificates=Certificates(str(server.cert), str(server.key), str(believed))
    ) as address:
        assert await answers(address, ours.trusted(other))
        shutil.copy(theirs.cert, believed)
        assert not await answers(address, ours.trusted(other))
        assert await answers(address, ours.trusted(stranger))


@pytest.mark.parametrize("client_ca", ["TLS"], indirect=True)
async def test_broken_files_keep_the_old_certificate_and_are_logged_once(
    address: str, ours: Authority, server: Signed, caplog: pytest.LogCaptureFixture
) -> None:
    server.key.unlink()
    with caplog.at_level(logging.INFO):
        assert await answers(address, ours.trusted())
        assert await answers(address, ours.trusted())
    (record,) = caplog.records
    assert "stay in force" in record.message and str(server.key) in record.message


@pytest.mark.parametrize("client_ca", ["mTLS"], indirect=True)
async def test_a_unix_socket_stays_in_clear_text(
    frontend: FakeFrontend, server: Signed, client_ca: str, tmp_path: Path
) -> None:
    certificates = Certificates(str(server.cert), str(server.key), client_ca)
    both = Server(frontend, config=ServerConfig(), certificates=certificates)  # type: ignore[arg-type]
    port, path = await both.start(("127.0.0.1:0", f"unix:{tmp_path}/s"), reuse_port=False)
    assert await answers(path, None)
    assert not await answers(port, None)
    await both.drain_and_stop(0)


def test_files_that_cannot_be_used_are_named(server: Signed, other: Signed, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cert, key = str(server.cert), str(server.key)
    for files, flag, why in [
        (("/no/such.pem", key, ""), "--tls-cert", "No such file"),
        ((cert, str(tmp_path), ""), "--tls-key", "directory"),
        ((cert, str(pipe), ""), "--tls-key", "not a regular file"),
        ((str(empty), key, ""), "--tls-cert", "no PEM certificate"),
        ((key, key, ""), "--tls-cert", "no PEM certificate"),
        ((cert, cert, ""), "--tls-key", "no PEM private key"),
        ((cert, str(other.key), ""), "--tls-key", "does not belong"),
        ((cert, key, str(empty)), "--tls-client-ca", "no PEM certificate"),
    ]:
        with pytest.raises(ConfigError) as caught:
            Certificates(*files)
        assert caught.value.field == flag
        wrong = dict(zip(("--tls-cert", "--tls-key", "--tls-client-ca"), files, strict=True))[flag]
        assert f"{flag} {wrong}" in caught.value.message and why in caught.value.message


@pytest.mark.parametrize("flags", [{"tls_cert": "a"}, {"tls_key": "a"}, {"tls_client_ca": "a"}])
def test_a_certificate_needs_its_key(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="without"):
        resolve(flags, {})
