"""The API keys in force, reloaded when their file changes."""

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

_CHECK_INTERVAL_S = 1.0


class KeyRing:
    """The keys of one file. Belongs to one event loop. Holds digests only: no key is ever stored or logged."""

    def __init__(self, path: str) -> None:
        """Read the file. Raise ConfigError if it cannot be used."""
        self._path = path
        self._seen = file_signature(path)
        self._keys: dict[bytes, ApiKey] = {}
        self._by_name: dict[str, ApiKey] = {}
        self._use(read_api_keys(path))

    def find(self, secret: str) -> ApiKey | None:
        """Return the key, or None. Compares all digests in constant time, so the duration reveals nothing."""
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def limits(self, name: str) -> OwnerLimits | None:
        """Return the limits of a key; None if no key has this name any more."""
        key = self._by_name.get(name)
        return None if key is None else OwnerLimits(key.max_concurrent, key.tokens_per_minute, key.weight)

    def look(self) -> None:
        """Reload the file if it has changed. If the new one is invalid, log the error and keep the keys."""
        seen = file_signature(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._use(read_api_keys(self._path))
        except ConfigError as error:
            _LOG.error("%s; the %d previous keys stay in force", error, len(self._keys))
        else:
            _LOG.info("%d API keys are in force", len(self._keys))

    async def watch(self) -> None:
        """Call `look` every second, without end."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            self.look()

    def _use(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = {bytes.fromhex(key.sha256): key for key in keys}
        self._by_name = {key.name: key for key in keys}
