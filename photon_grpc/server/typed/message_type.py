"""Message types of typed output: a caller's descriptors become a grammar, and JSON becomes a message."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from photon_grpc.core.ask import ConstraintAsk, Origin
from photon_grpc.errors import DescriptorSetUnknown, InvalidConstraint, InvalidRequest
from photon_grpc.frontend.fair_turns import FairTurns
from photon_grpc.frontend.shared_cache import SharedCache
from photon_grpc.server.typed.field_forms import BY_TYPE, FieldForms
from photon_grpc.server.typed.json_grammar import TooManyFields, write_json_grammar
from photon_grpc.server.typed.message_graph import (
    FIELD,
    MAX_DEPTH,
    WELL_KNOWN_FILES,
    WELL_KNOWN_TYPES,
    MessageGraph,
    refused,
)
from photon_grpc.server.wire.fields import count_fields
from photon_grpc.v1 import inference_pb2 as pb

_NAME_FIELD = "structured_output.protobuf.message_type"
_DIGEST_FIELD = "structured_output.protobuf.file_descriptor_set_sha256"
_DIGEST_BYTES = 32
_MAX_SET_BYTES = 2**20
#: Fields of the whole set on the wire; reading them takes about 30 ms.
_MAX_SET_FIELDS = 2**15
#: Memory of the types and sets that are kept; room for the type of the largest set. By malloc's count a type takes its
#: grammar and 20 to 60 times its set without comments, at least 44 KiB.
_MAX_CACHE_BYTES = 2**26
_BYTES_PER_SET_BYTE, _TYPE_BYTES = 60, 44 * 2**10
_MAX_ERROR_CHARS = 500
#: Types read at a time, each in at most 30 ms. Several threads would in turn take the interpreter from the event loop.
_NUM_READERS = 1
#: Types that wait or are being read, and the bytes of their sets.
_MAX_READING = 1024
_MAX_READING_BYTES = 2**25


@dataclass(frozen=True, slots=True, eq=False)
class MessageType:
    """A message type and the grammar of its JSON."""

    name: str
    message_class: type[Message]
    #: A Lark grammar.
    grammar: str
    #: The set that it was read from, without comments.
    files: bytes

    @property
    def constraint(self) -> ConstraintAsk:
        return ConstraintAsk("protobuf", self.grammar)

    def parse(self, text: str) -> Message:
        """Parse JSON; a map's duplicate key keeps its last value. Raise ValueError, ParseError."""
        return ParseDict(json.loads(text), self.message_class())


class Described(NamedTuple):
    """A request's description of its type."""

    #: A serialized FileDescriptorSet; empty if the digest stands for it.
    files: bytes
    #: The SHA-256 digest of a set; empty if the request has none.
    digest: bytes
    name: str


class MessageTypes:
    """A cache of requested types, and of their sets by digest. Belongs to one event loop.

    New types are read in a thread, fairly between callers. Types and sets are shared within an API key, or by all
    without keys.

    Args:
        max_cache_bytes: memory of the types and sets.
    """

    def __init__(self, max_cache_bytes: int = _MAX_CACHE_BYTES) -> None:
        #: Types, and under _SET instead of a name the serialized sets.
        self._kept: SharedCache[_Key, Any] = SharedCache(max_cache_bytes)
        self._max_cache_bytes = max_cache_bytes
        #: Bytes of types made since the last garbage collection.
        self._num_made_bytes = 0
        self._threads = ThreadPoolExecutor(_NUM_READERS, "types")
        self._turns = FairTurns(
            _NUM_READERS, "message types wait to be read", max_jobs=_MAX_READING, max_bytes=_MAX_READING_BYTES
        )

    def wanted(self, request: pb.StructuredOutput.Protobuf, origin: Origin) -> RequestedType:
        """Return the type of a request, found once that has its place. Raise InvalidConstraint, InvalidRequest."""
        described = Described(request.file_descriptor_set, request.file_descriptor_set_sha256, request.message_type)
        _check(described)
        return RequestedType(self, described, origin)

    async def find(self, described: Described, origin: Origin) -> MessageType:
        """Return the type. Raise InvalidConstraint, InvalidRequest, DescriptorSetUnknown, QueueFull."""
        owner, digest, caller = origin.owner, _digest(described), origin.caller
        key, set_key = (owner, digest, described.name), (owner, digest, _SET)
        kept: MessageType | None = self._kept.find(caller, key)
        if kept is not None:
            return kept
        files = self._kept.find(caller, set_key) if described.digest and not described.files else described.files
        if files is None:
            raise _unknown()
        made = await self._read(key, files, caller)
        self._kept.keep(caller, set_key, made.files, len(made.files))
        return made

    async def _read(self, key: _Key, files: bytes, caller: str) -> MessageType:
        place = await self._turns.enter(caller, len(files))
        kept: MessageType | None = self._kept.find(caller, key)
        if kept is not None:  # read while this call waited
            self._turns.leave(place)
            return kept
        made = await self._turns.perform(place, self._threads, read_message_type, files, key[2])
        num_bytes = _num_bytes(made)
        self._kept.keep(caller, key, made, num_bytes)
        self._collect(num_bytes)
        return made

    def _collect(self, num_bytes: int) -> None:
        """Collect evicted types now and then: classes are cyclic, and the collector counts objects instead of bytes."""
        self._num_made_bytes += num_bytes
        if self._num_made_bytes > self._max_cache_bytes:
            self._num_made_bytes = 0
            gc.collect()


class RequestedType:
    """The message type of one request."""

    def __init__(self, types: MessageTypes, described: Described, origin: Origin) -> None:
        self._types = types
        self._described = described
        self._origin = origin
        #: Set once its constraint has been written.
        self.found: MessageType | None = None

    async def constraint(self) -> ConstraintAsk:
        """Find the type, and return its constraint.

        Raise InvalidConstraint, InvalidRequest, DescriptorSetUnknown, QueueFull.
        """
        described, self._described = self._described, self._described._replace(files=b"")  # it may hold a megabyte
        self.found = await self._types.find(described, self._origin)
        return self.found.constraint


#: API key, digest of the set, name.
_Key = tuple[str, bytes, str]
#: No type has this name.
_SET = ""


def _num_bytes(made: MessageType) -> int:
    """Return the memory of a type. Messages that refer to each other have a grammar of many times their set."""
    return _TYPE_BYTES + _BYTES_PER_SET_BYTE * len(made.files) + len(made.grammar)


def _digest(described: Described) -> bytes:
    """Return the digest of the set. Raise InvalidRequest if the request has another one."""
    if described.digest and not described.files:
        return described.digest
    digest = hashlib.sha256(described.files).digest()
    if described.digest not in (b"", digest):
        problem = f"is {described.digest.hex()}, but the digest of file_descriptor_set is {digest.hex()}"
        raise InvalidRequest(f"{_DIGEST_FIELD}: {problem}", field=_DIGEST_FIELD)
    return digest


def _unknown() -> DescriptorSetUnknown:
    problem = "this replica does not hold the set with this digest; send file_descriptor_set"
    return DescriptorSetUnknown(f"{_DIGEST_FIELD}: {problem}", field=_DIGEST_FIELD)


def read_message_type(files: bytes, name: str) -> MessageType:
    """Return the type `name` of a serialized FileDescriptorSet. Raise InvalidConstraint."""
    parsed = _parsed(files)
    pool = pool_of({file.name: file for file in parsed.file}, name)
    try:
        root = pool.FindMessageTypeByName(name)
    except KeyError:
        raise InvalidConstraint(f"{_NAME_FIELD}: the set has no message {name[:200]!r}", field=_NAME_FIELD) from None
    return MessageType(root.full_name, GetMessageClass(root), grammar_of(root, pool), parsed.SerializeToString())


def grammar_of(root: Descriptor, pool: DescriptorPool, forms: FieldForms = BY_TYPE, **limits: Any) -> str:
    """Return the Lark grammar of a message, with the limits of `write_json_grammar`. Raise InvalidConstraint."""
    graph = MessageGraph(root, pool, forms)
    try:
        return write_json_grammar(graph, **limits).text
    except TooManyFields:
        problem = f"{root.full_name} requires too many fields within one another, to a depth of"
        needed = graph.least_depth(root)
        raise refused(f"{problem} {needed}; {MAX_DEPTH} are allowed", needed=needed, limit=MAX_DEPTH) from None


def _check(described: Described) -> None:
    files, digest, name = described
    if not (files or digest or name in WELL_KNOWN_TYPES):
        raise InvalidRequest(f"{FIELD}: must not be empty, unless file_descriptor_set_sha256 is set", field=FIELD)
    if not name:
        raise InvalidRequest(f"{_NAME_FIELD}: must not be empty", field=_NAME_FIELD)
    if len(digest) not in (0, _DIGEST_BYTES):
        problem = f"has {len(digest)} bytes; a SHA-256 digest has {_DIGEST_BYTES}"
        raise InvalidRequest(f"{_DIGEST_FIELD}: {problem}", field=_DIGEST_FIELD)
    if len(files) > _MAX_SET_BYTES:
        problem = f"has {len(files)} bytes; {_MAX_SET_BYTES} are allowed"
        raise refused(problem, needed=len(files), limit=_MAX_SET_BYTES)


def _parsed(files: bytes) -> descriptor_pb2.FileDescriptorSet:
    """Return the set without comments, which may be most of it."""
    try:
        count_fields(files, descriptor_pb2.FileDescriptorSet.DESCRIPTOR, _MAX_SET_FIELDS)
        parsed = descriptor_pb2.FileDescriptorSet.FromString(files)
    except InvalidRequest as error:
        if error.needed is not None:
            problem = f"has {error.needed} fields or more; {error.limit} are allowed"
            raise refused(problem, needed=error.needed, limit=error.limit) from None
        raise refused("is not a serialized google.protobuf.FileDescriptorSet") from None
    except DecodeError:
        raise refused("is not a serialized google.protobuf.FileDescriptorSet") from None
    names = [file.name for file in parsed.file]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise refused(f"the file {twice!r} is in it {names.count(twice)} times")
    for file in parsed.file:
        file.ClearField("source_code_info")
    return parsed


def pool_of(files: dict[str, descriptor_pb2.FileDescriptorProto], message_type: str = "") -> DescriptorPool:
    """Return a pool of the files, with that of `message_type` added if it is well known. Raise InvalidConstraint."""
    pool = DescriptorPool()
    roots = [*files, WELL_KNOWN_TYPES[message_type]] if message_type in WELL_KNOWN_TYPES else [*files]
    for name in in_order(files, roots):
        try:
            if name in WELL_KNOWN_FILES:
                pool.AddSerializedFile(WELL_KNOWN_FILES[name])
            else:
                pool.AddSerializedFile(files[name].SerializeToString())
        except Exception as error:  # protobuf raises TypeError with a detailed text
            raise refused(f"the file {name!r} is invalid: {str(error)[:_MAX_ERROR_CHARS]}") from None
    return pool


def in_order(files: dict[str, descriptor_pb2.FileDescriptorProto], roots: list[str]) -> Iterator[str]:
    """Yield the `roots` and their imports, imports first. Raise InvalidConstraint if one is missing or circular."""
    done, begun = set[str](), set[str]()
    for first in roots:
        waiting = [first]
        while waiting:
            name = waiting[-1]
            imports = _imports(files, name)
            missing = [each for each in imports if each not in files and each not in WELL_KNOWN_FILES]
            if missing:
                raise refused(f"{name!r} imports {missing[0]!r}, which is not in it")
            pending = [each for each in imports if each not in done]
            if name in done or not pending:
                waiting.pop()
                if name not in done:
                    done.add(name)
                    yield name
                continue
            if name in begun:
                raise refused(f"{name!r} imports itself, by way of {pending[0]!r}")
            begun.add(name)
            waiting += pending


def _imports(files: dict[str, descriptor_pb2.FileDescriptorProto], name: str) -> list[str]:
    if name in WELL_KNOWN_FILES:
        return list(descriptor_pb2.FileDescriptorProto.FromString(WELL_KNOWN_FILES[name]).dependency)
    return list(files[name].dependency)
