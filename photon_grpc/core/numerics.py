"""The properties of an engine that, beside the weights, decide the bits of a result, and their version."""

from __future__ import annotations

import hashlib

import msgspec

#: Characters of the digest.
_LENGTH = 16
#: Begins the version of engines that promise no bits, so that equal versions of theirs mean nothing.
_FAST = "fast-"


class Numerics(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a numerics version. Equal versions have equal parts."""

    #: Digest of all other fields, in hex; in the mode `fast` behind a prefix. Empty: not known.
    version: str = ""
    #: Our own number; it rises when a change of ours may change bits.
    number: int = 0
    mode: str = ""
    #: "torch" or "triton".
    kernels: str = ""
    #: Such as "torch 2.11.0" and "cublas 13.1.0".
    libraries: tuple[str, ...] = ()
    #: The properties of the device by which libraries and kernels choose how sums are cut.
    device: str = ""
    #: In which the layers compute.
    dtype: str = ""
    #: The formats in which weights, the inputs of their products, keys and values are held.
    weights: str = ""
    activations: str = ""
    kv_cache: str = ""

    def signed(self) -> Numerics:
        """Return it with the version of its parts."""
        parts = {name: getattr(self, name) for name in self.__struct_fields__ if name != "version"}
        digest = hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:_LENGTH]
        return msgspec.structs.replace(self, version=digest if self.mode == "strict" else _FAST + digest)


NO_NUMERICS = Numerics()
