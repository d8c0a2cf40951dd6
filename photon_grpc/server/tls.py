"""TLS and mTLS from PEM files, which are reloaded at the first handshake after a change."""

from __future__ import annotations

import logging

import grpc

from photon_grpc.config.file_signature import file_signature
from photon_grpc.config.tls_files import read_tls_files, tls_files
from photon_grpc.errors import ConfigError

_LOG = logging.getLogger(__name__)


class Certificates:
    """The files of --tls-cert, --tls-key and --tls-client-ca."""

    def __init__(self, cert: str, key: str, client_ca: str = "") -> None:
        """Read the files. `client_ca` makes client certificates mandatory. Raise ConfigError naming the file."""
        self._files = tls_files(cert, key, client_ca)
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
                _LOG.error("%s; the previous certificates stay in force", error)
        return self._configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pem = read_tls_files(self._files)
        return grpc.ssl_server_certificate_configuration(
            [(pem["--tls-key"], pem["--tls-cert"])], pem.get("--tls-client-ca")
        )

    def _signatures(self) -> tuple[tuple[int, ...], ...]:
        return tuple(file_signature(path) for path in self._files.values())
