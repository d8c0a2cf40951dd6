"""The files of `--tls-cert`, `--tls-key` and `--tls-client-ca`."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from photon_grpc.config.regular_file import read_regular_file
from photon_grpc.errors import ConfigError


def tls_files(cert: str, key: str, client_ca: str = "") -> dict[str, str]:
    """Return the paths by flag; without `client_ca` there is no such flag."""
    return {"--tls-cert": cert, "--tls-key": key} | ({"--tls-client-ca": client_ca} if client_ca else {})


def read_tls_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """Return the contents of the files, both by flag. Raise ConfigError naming the flag and the file."""
    pem = {flag: _read_file(flag, path) for flag, path in files.items()}
    for flag in files.keys() - {"--tls-key"}:
        _check_certificates(flag, files[flag], pem[flag])
    _check_key(files["--tls-cert"], files["--tls-key"])
    return pem


def _read_file(flag: str, path: str) -> bytes:
    try:
        return read_regular_file(path)
    except OSError as error:
        raise _bad_file(flag, path, error.strerror or "cannot be read") from None


def _check_certificates(flag: str, path: str, pem: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        raise _bad_file(flag, path, "holds no PEM certificate") from None


def _check_key(cert: str, key: str) -> None:
    try:
        # Without a password callback OpenSSL would prompt on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        is_foreign = error.reason == "KEY_VALUES_MISMATCH"
        problem = "does not belong to --tls-cert" if is_foreign else "holds no PEM private key without a password"
        raise _bad_file("--tls-key", key, problem) from None


def _bad_file(flag: str, path: str, problem: str) -> ConfigError:
    return ConfigError(f"{flag} {path}: {problem}", field=flag)
