from __future__ import annotations

import socket

import pytest

from photon_grpc.config.flags import ServerConfig
from photon_grpc.errors import ConfigError
from photon_grpc.service.endpoints.listen import UnixPath, check_distinct, plan_listeners, plan_service


def listening(port: int = 0, *, shared: bool) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def test_one_front_end_binds_what_was_written():
    plan = plan_listeners(("127.0.0.1:0", "unix:/tmp/photon-no-such-socket"), 1)
    assert plan.of(0) == ("127.0.0.1:0", "unix:/tmp/photon-no-such-socket")
    assert not plan.reuse_port


def test_several_share_a_number_that_is_kept_and_the_first_owns_unix_sockets():
    plan = plan_listeners(("127.0.0.1:0", "unix:/tmp/photon-no-such-socket"), 3)
    address = plan.of(2)[0]
    assert plan.of(0) == (address, "unix:/tmp/photon-no-such-socket")
    assert plan.of(1) == plan.of(2) == (address,)
    port = int(address.rpartition(":")[2])
    with listening(port, shared=True), listening(port, shared=True), pytest.raises(OSError, match="in use"):
        listening(port, shared=False)
    plan.close()
    listening(port, shared=False).close()


def test_a_port_is_had_again_while_connections_of_a_server_alone_wait_for_their_last_packets():
    with socket.create_server(("127.0.0.1", 0), reuse_port=False) as alone:
        port = alone.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            alone.accept()[0].close()  # who closes first waits
            assert client.recv(1) == b""
    plan_listeners((f"127.0.0.1:{port}",), 2).close()


@pytest.mark.parametrize("shared", [True, False])
def test_a_port_of_somebody_else_is_not_shared(shared):
    with listening(shared=shared) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"cannot listen on {address}.*in use.*--listen"):
            plan_listeners((address,), 2)


@pytest.mark.parametrize(
    ("listen", "metrics"),
    [
        (("127.0.0.1:5000", "localhost:5000"), ""),
        (("0.0.0.0:5000",), "127.0.0.1:5000"),
        (("[::1]:5000",), "0.0.0.0:5000"),
        (("127.0.0.1:5000",), "[::]:5000"),
        (("[::1]:5000", "[0:0::1]:5000"), ""),
    ],
)
def test_one_port_in_two_spellings_is_refused(listen, metrics):
    with pytest.raises(ConfigError, match=r"5000 and .*5000 are one place.*--metrics-listen"):
        check_distinct(ServerConfig(listen=listen, metrics_listen=metrics))


def test_http_and_grpc_are_one_place_too() -> None:
    with pytest.raises(ConfigError, match=r"5000 and .*5000 are one place.*--http-listen"):
        check_distinct(ServerConfig(listen=("127.0.0.1:5000",), http_listen=("localhost:5000",)))


@pytest.mark.parametrize("frontends", [1, 2])
def test_an_http_address_in_use_reserves_no_other(frontends: int) -> None:
    with listening(shared=False) as taken:
        with listening(shared=False) as found:
            port = found.getsockname()[1]
        busy, free = f"127.0.0.1:{taken.getsockname()[1]}", f"127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=rf"cannot listen (at|on) {busy}.*--http-listen"):
            plan_service(ServerConfig(listen=(free,), http_listen=(busy,), frontends=frontends))
    listening(port, shared=False).close()


@pytest.mark.parametrize("frontends", [1, 2])
def test_http_addresses_are_planned_as_those_of_grpc(frontends: int) -> None:
    plan = plan_service(ServerConfig(listen=("127.0.0.1:0",), http_listen=("127.0.0.1:0",) * 2, frontends=frontends))
    assert len(plan.http.of(1)) == 2 and plan.http.reuse_port == plan.grpc.reuse_port == (frontends > 1)
    assert all(address.endswith(":0") == (frontends == 1) for address in plan.http.of(0))
    plan.close()


def test_without_an_http_server_nothing_is_planned_for_it() -> None:
    plan = plan_service(ServerConfig(listen=("127.0.0.1:0",), frontends=2))
    assert plan.http.of(0) == ()
    plan.close()


def test_one_unix_path_in_two_spellings_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    up = f"{tmp_path}/../{tmp_path.name}"
    for other in (f"unix:{tmp_path}/link/a.sock", f"unix:{up}/a.sock", f"unix://{tmp_path}/a.sock"):
        with pytest.raises(ConfigError, match=r"a\.sock and .* are one place"):
            check_distinct(ServerConfig(listen=(f"unix:{tmp_path}/a.sock",), admin_listen=other))


def test_addresses_apart_are_not_refused():
    listen = ("127.0.0.1:5000", "127.0.0.2:5000", "localhost:0", "127.0.0.1:0", "unix:/tmp/a", "no-such-host.invalid:1")
    check_distinct(ServerConfig(listen=listen, admin_listen="none", metrics_listen="0.0.0.0:5001"))
    check_distinct(ServerConfig(listen=("unix:none",), admin_listen="unix:/tmp/a", metrics_listen="127.0.0.1:0"))


def test_a_unix_path_is_removed_only_while_it_is_ours(tmp_path):
    path = tmp_path / "photon.sock"
    assert UnixPath.of(f"unix:{path}") is None
    ours = socket.socket(socket.AF_UNIX)
    ours.bind(str(path))
    bound = UnixPath.of(f"unix:{path}")
    path.rename(tmp_path / "old")
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        bound.remove()
        assert path.exists()
    UnixPath.of(f"unix:{path}").remove()
    assert not path.exists()
    bound.remove()
    ours.close()
