"""Certificates for tests, made by the openssl program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True)
class Signed:
    """A certificate and its key."""

    cert: Path
    key: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return "--tls-cert", str(self.cert), "--tls-key", str(self.key)


class Authority:
    """An authority that signs certificates for 127.0.0.1."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._own = Signed(directory / f"{name}.ca.pem", directory / f"{name}.ca.key")
        self._make(self._own, f"authority {name}", "-x509", "-addext", "basicConstraints=critical,CA:TRUE")

    @property
    def cert(self) -> Path:
        return self._own.cert

    def signed(self, name: str) -> Signed:
        made = Signed(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        by = ("-CA", str(self._own.cert), "-CAkey", str(self._own.key))
        self._make(made, name, "-x509", *by, "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        return made

    def _make(self, made: Signed, name: str, *more: str) -> None:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(made.key))
        command = ["openssl", "req", "-new", *key, "-subj", f"/CN={name}", "-days", "2", "-out", str(made.cert), *more]
        subprocess.run(command, check=True, capture_output=True)

    def trusted(self, client: Signed | None = None) -> grpc.ChannelCredentials:
        """Return the credentials of a client that trusts this authority and presents `client`'s certificate."""
        key, cert = (client.key.read_bytes(), client.cert.read_bytes()) if client else (None, None)
        return grpc.ssl_channel_credentials(self.cert.read_bytes(), key, cert)
