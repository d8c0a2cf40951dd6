"""TLS and mTLS of the HTTP server, from the same PEM files as gRPC's; they are read again after a change."""

from __future__ import annotations

import logging
import ssl
import time

from photon_grpc.config.file_signature import file_signature
from photon_grpc.config.tls_files import read_tls_files, tls_files
from photon_grpc.errors import ConfigError

_LOG = logging.getLogger(__name__)
#: The files are looked at no more often.
_CHECK_INTERVAL_S = 1.0


class HttpCertificates:
    """The files of --tls-cert, --tls-key and --tls-client-ca."""

    def __init__(
        self, cert: str, key: str, client_ca: str = "", *, check_interval_s: float = _CHECK_INTERVAL_S
    ) -> None:
        """Read the files. `client_ca` makes client certificates mandatory. Raise ConfigError naming the file."""
        self._files = tls_files(cert, key, client_ca)
        self._check_interval_s = check_interval_s
        self._seen = self._signatures()
        self._checked_s = time.monotonic()
        self._context = self._read()

    def context(self) -> ssl.SSLContext:
        """Return the context for a handshake, from the files as they are now."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= self._check_interval_s:
            self._checked_s = now_s
            self._read_changes()
        return self._context

    def _read_changes(self) -> None:
        seen = self._signatures()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._context = self._read()
            _LOG.info("TLS certificates were read again for HTTP")
        except ConfigError as error:
            # Files may be half written; the next change reads them again.
            _LOG.error("%s; the previous certificates stay in force", error)

    def _read(self) -> ssl.SSLContext:
        read_tls_files(self._files)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._files["--tls-cert"], self._files["--tls-key"], password=lambda: b"")
            if client_ca := self._files.get("--tls-client-ca"):
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(client_ca)
        except OSError as error:
            # The files changed since they were checked.
            raise ConfigError(f"the TLS files changed while they were read: {error.strerror}") from None
        return context

    def _signatures(self) -> tuple[tuple[int, ...], ...]:
        return tuple(file_signature(path) for path in self._files.values())
