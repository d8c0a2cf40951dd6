"""TLS and mTLS from PEM files, which are reloaded at the first handshake after a change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from photon_grpc.config.file_signature import file_signature
from photon_grpc.errors import ConfigError

_LOG = logging.getLogger(__name__)


class Certificates:
    """The files of --tls-cert, --tls-key and --tls-client-ca."""

    def __init__(self, cert: str, key: str, client_ca: str = "") -> None:
        """Read the files. `client_ca` makes client certificates mandatory. Raise ConfigError naming the file."""
        self._files = {"--tls-cert": cert, "--tls-key": key} | ({"--tls-client-ca": client_ca} if client_ca else {})
        self._seen = self._signatures()
        self._configuration = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for one listener."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration, self._changed, require_client_authentication="--tls-client-ca" in self._files
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificates for a handshake, reloaded if they changed. Runs in gRPC's threads."""
        seen = self._signatures()
        if seen != self._seen:
            self._seen = seen
            try:
                self._configuration = self._read()
                _LOG.info("TLS certificates were read again")
            except ConfigError as error:
                # Files may be half written; the next change reloads them.
                _LOG.error("%s; the certificates of before stay in force", error)
        return self._configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pem = {flag: _read_file(flag, path) for flag, path in self._files.items()}
        for flag in self._files.keys() - {"--tls-key"}:
            _check_certificates(flag, self._files[flag], pem[flag])
        self._check_key()
        return grpc.ssl_server_certificate_configuration(
            [(pem["--tls-key"], pem["--tls-cert"])], pem.get("--tls-client-ca")
        )

    def _check_key(self) -> None:
        path = self._files["--tls-key"]
        try:
            # Without a password callback OpenSSL would prompt on the terminal.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._files["--tls-cert"], path, password=lambda: b"")
        except ssl.SSLError as error:
            is_foreign = error.reason == "KEY_VALUES_MISMATCH"
            problem = "does not belong to --tls-cert" if is_foreign else "holds no PEM private key without a password"
            raise _bad_file("--tls-key", path, problem) from None

    def _signatures(self) -> tuple[tuple[int, ...], ...]:
        return tuple(file_signature(path) for path in self._files.values())


def _read_file(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _bad_file(flag, path, error.strerror or "cannot be read") from None


def _check_certificates(flag: str, path: str, pem: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        raise _bad_file(flag, path, "holds no PEM certificate") from None


def _bad_file(flag: str, path: str, problem: str) -> ConfigError:
    return ConfigError(f"{flag} {path}: {problem}", field=flag)
