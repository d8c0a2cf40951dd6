"""Message types of typed output: a caller's descriptors become a grammar, and JSON becomes a message."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from photon_grpc.core.ask import ConstraintAsk, Origin
from photon_grpc.errors import InvalidConstraint, InvalidRequest
from photon_grpc.frontend.fair_turns import FairTurns
from photon_grpc.frontend.shared_cache import SharedCache
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
_MAX_SET_BYTES = 2**20
#: Fields of the whole set on the wire; reading them takes about 30 ms.
_MAX_SET_FIELDS = 2**15
#: Memory of the types that are kept. By malloc's count a type takes its grammar and 20 to 60 times its set, at least
#: 44 KiB.
_MAX_CACHE_BYTES = 2**25
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

    @property
    def constraint(self) -> ConstraintAsk:
        return ConstraintAsk("protobuf", self.grammar)

    def parse(self, text: str) -> Message:
        """Parse JSON; a map's duplicate key keeps its last value. Raise ValueError, ParseError."""
        return ParseDict(json.loads(text), self.message_class())


class MessageTypes:
    """A cache of requested types. Belongs to one event loop.

    New types are read in a thread, fairly between callers. A type is shared within an API key, or by all without keys.

    Args:
        max_cache_bytes: memory of the types.
    """

    def __init__(self, max_cache_bytes: int = _MAX_CACHE_BYTES) -> None:
        self._kept: SharedCache[_Key, MessageType] = SharedCache(max_cache_bytes)
        self._max_cache_bytes = max_cache_bytes
        #: Bytes of types made since the last garbage collection.
        self._num_made_bytes = 0
        self._threads = ThreadPoolExecutor(_NUM_READERS, "types")
        self._turns = FairTurns(
            _NUM_READERS, "message types wait to be read", max_jobs=_MAX_READING, max_bytes=_MAX_READING_BYTES
        )

    def wanted(self, request: pb.StructuredOutput.Protobuf, origin: Origin) -> WantedType:
        """Return the type of a request, found once that has its place. Raise InvalidConstraint, InvalidRequest."""
        files, name = request.file_descriptor_set, request.message_type
        _check(files, name)
        return WantedType(self, files, name, origin)

    async def find(self, files: bytes, name: str, origin: Origin) -> MessageType:
        """Return the type `name` of the set `files`. Raise InvalidConstraint, QueueFull."""
        key = (origin.owner, hashlib.sha256(files).digest(), name)
        kept = self._kept.find(origin.caller, key)
        return kept or await self._read(key, files, origin.caller)

    async def _read(self, key: _Key, files: bytes, caller: str) -> MessageType:
        place = await self._turns.enter(caller, len(files))
        kept = self._kept.find(caller, key)
        if kept is not None:  # read while this call waited
            self._turns.leave(place)
            return kept
        made = await self._turns.perform(place, self._threads, read_message_type, files, key[2])
        num_bytes = _num_bytes(files, made)
        self._kept.keep(caller, key, made, num_bytes)
        self._collect(num_bytes)
        return made

    def _collect(self, num_bytes: int) -> None:
        """Collect evicted types now and then: classes are cyclic, and the collector counts objects instead of bytes."""
        self._num_made_bytes += num_bytes
        if self._num_made_bytes > self._max_cache_bytes:
            self._num_made_bytes = 0
            gc.collect()


class WantedType:
    """The message type of one request."""

    def __init__(self, types: MessageTypes, files: bytes, name: str, origin: Origin) -> None:
        self._types = types
        self._files = files
        self._name = name
        self._origin = origin
        #: Set once its constraint has been written.
        self.found: MessageType | None = None

    async def constraint(self) -> ConstraintAsk:
        """Find the type, and return its constraint. Raise InvalidConstraint, QueueFull."""
        files, self._files = self._files, b""  # it may hold a megabyte
        self.found = await self._types.find(files, self._name, self._origin)
        return self.found.constraint


#: API key, digest of the set, name.
_Key = tuple[str, bytes, str]


def _num_bytes(files: bytes, made: MessageType) -> int:
    """Return the memory of a type. Messages that refer to each other have a grammar of many times their set."""
    return _TYPE_BYTES + _BYTES_PER_SET_BYTE * len(files) + len(made.grammar)


def read_message_type(files: bytes, name: str) -> MessageType:
    """Return the type `name` of a serialized FileDescriptorSet. Raise InvalidConstraint."""
    pool = _pool(_parsed(files), name)
    try:
        root = pool.FindMessageTypeByName(name)
    except KeyError:
        raise InvalidConstraint(f"{_NAME_FIELD}: the set has no message {name[:200]!r}", field=_NAME_FIELD) from None
    graph = MessageGraph(root, pool)
    try:
        grammar = write_json_grammar(graph).text
    except TooManyFields:
        problem = f"{root.full_name} requires too many fields within one another, to a depth of"
        needed = graph.least_depth(root)
        raise refused(f"{problem} {needed}; {MAX_DEPTH} are allowed", needed=needed, limit=MAX_DEPTH) from None
    return MessageType(root.full_name, GetMessageClass(root), grammar)


def _check(files: bytes, name: str) -> None:
    for field, value in ((FIELD, files or name in WELL_KNOWN_TYPES), (_NAME_FIELD, name)):
        if not value:
            raise InvalidRequest(f"{field}: must not be empty", field=field)
    if len(files) > _MAX_SET_BYTES:
        problem = f"has {len(files)} bytes; {_MAX_SET_BYTES} are allowed"
        raise refused(problem, needed=len(files), limit=_MAX_SET_BYTES)


def _parsed(files: bytes) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """Return the files by name."""
    try:
        count_fields(files, descriptor_pb2.FileDescriptorSet.DESCRIPTOR, _MAX_SET_FIELDS)
        parsed = descriptor_pb2.FileDescriptorSet.FromString(files).file
    except InvalidRequest as error:
        if error.needed is not None:
            problem = f"has {error.needed} fields or more; {error.limit} are allowed"
            raise refused(problem, needed=error.needed, limit=error.limit) from None
        raise refused("is not a serialized google.protobuf.FileDescriptorSet") from None
    except DecodeError:
        raise refused("is not a serialized google.protobuf.FileDescriptorSet") from None
    by_name = {file.name: file for file in parsed}
    if len(by_name) < len(parsed):
        names = [file.name for file in parsed]
        twice = next(name for name in names if names.count(name) > 1)
        raise refused(f"the file {twice!r} is in it {names.count(twice)} times")
    return by_name


def _pool(files: dict[str, descriptor_pb2.FileDescriptorProto], message_type: str) -> DescriptorPool:
    """Return a pool of the files, with that of `message_type` added if it is well known."""
    pool = DescriptorPool()
    roots = [*files, WELL_KNOWN_TYPES[message_type]] if message_type in WELL_KNOWN_TYPES else [*files]
    for name in _in_order(files, roots):
        try:
            if name in WELL_KNOWN_FILES:
                pool.AddSerializedFile(WELL_KNOWN_FILES[name])
            else:
                pool.AddSerializedFile(files[name].SerializeToString())
        except Exception as error:  # protobuf raises TypeError with a detailed text
            raise refused(f"the file {name!r} is invalid: {str(error)[:_MAX_ERROR_CHARS]}") from None
    return pool


def _in_order(files: dict[str, descriptor_pb2.FileDescriptorProto], roots: list[str]) -> Iterator[str]:
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
