"""The API keys in force, read again when their file changes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging

from photon_grpc.config.api_keys import ApiKey, read_api_keys
from photon_grpc.config.file_signature import file_signature
from photon_grpc.core.request import OwnerLimits
from photon_grpc.errors import ConfigError

_LOG = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0


class KeyRing:
    """Belongs to one event loop. Holds digests only: no key is ever stored or logged."""

    def __init__(self, path: str) -> None:
        """Raise ConfigError for a file that cannot be used."""
        self._path = path
        self._seen = file_signature(path)
        self._keys: dict[bytes, ApiKey] = {}
        self._by_name: dict[str, ApiKey] = {}
        self._use(read_api_keys(path))

    def find(self, secret: str) -> ApiKey | None:
        """Return the key that `secret` is. Takes as long whether and where it is found: every digest is compared, each
        in constant time."""
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def limits(self, name: str) -> OwnerLimits | None:
        """None for a name that is no key's any more."""
        key = self._by_name.get(name)
        return None if key is None else OwnerLimits(key.max_concurrent, key.tokens_per_minute, key.weight)

    def look(self) -> None:
        """Read the file again if it has changed. A broken one leaves the keys as they are, and is told in the log."""
        seen = file_signature(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._use(read_api_keys(self._path))
        except ConfigError as error:
            _LOG.error("%s; the %d keys of before stay in force", error, len(self._keys))
        else:
            _LOG.info("%d API keys are in force", len(self._keys))

    async def watch(self) -> None:
        """For ever: `look` every second."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            self.look()

    def _use(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = {bytes.fromhex(key.sha256): key for key in keys}
        self._by_name = {key.name: key for key in keys}
