"""Typed output: a generated class described to the server, and its message read back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from photon_grpc.errors import InternalFailure, InvalidRequest, RequestError
from photon_grpc.v1 import inference_pb2 as pb

M = TypeVar("M", bound=Message)

#: Directory of the files that the server has.
_WELL_KNOWN = "google/protobuf/"
#: Modules of the files that a set may omit.
_WELL_KNOWN_MODULES: tuple[Any, ...] = (
    *(any_pb2, descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2, struct_pb2, timestamp_pb2, wrappers_pb2),
)


#: Classes whose sets are kept.
_MAX_DESCRIBED = 16


class MessageMismatch(RequestError):
    """The output is not a complete message, or object, of the type."""

    reason = "MESSAGE_MISMATCH"

    def __init__(self, message: str, *, text: str = "", finish_reason: str = "") -> None:
        """Take the output's text and finish reason."""
        super().__init__(message)
        self.text = text
        self.finish_reason = finish_reason


class WrongMessageType(MessageMismatch):
    """A TypedMessage holds a message of another type than the one that was expected."""

    reason = "WRONG_MESSAGE_TYPE"


@dataclass(frozen=True, slots=True)
class DescribedType:
    """A generated class as a request describes it."""

    name: str
    #: The class's file and all imports, as a serialized FileDescriptorSet.
    files: bytes
    #: The SHA-256 digest of `files`.
    digest: bytes


def find_message_type(descriptor_set: bytes, name: str) -> type[Message]:
    """Return a class for message `name` of a serialized FileDescriptorSet. Raise InvalidRequest."""
    try:
        parsed = FileDescriptorSet.FromString(descriptor_set).file
    except DecodeError:
        raise _no_message_type("the file is not a serialized google.protobuf.FileDescriptorSet") from None
    files = {module.DESCRIPTOR.name: _described(module.DESCRIPTOR) for module in _WELL_KNOWN_MODULES}
    files |= {file.name: file for file in parsed}
    pool = DescriptorPool()
    try:
        for each in [*files]:
            _add_file(pool, files, each)
        return GetMessageClass(pool.FindMessageTypeByName(name))
    except KeyError:
        raise _no_message_type(f"the set has no message {name!r}") from None
    except TypeError as error:  # raised by protobuf for an invalid file or a missing import
        raise _no_message_type(str(error)) from None


def write_message_type(target: pb.StructuredOutput.Protobuf, message_type: Any) -> None:
    """Write the class's name, its file and all imports. Raise InvalidRequest if it is not a generated class."""
    if not isinstance(message_type, type) or not issubclass(message_type, Message):
        raise InvalidRequest(f"message_type: {message_type!r} is not a message class", field="message_type")
    described = describe(message_type)
    target.file_descriptor_set = described.files
    target.message_type = described.name


def describe(message_type: type[Message]) -> DescribedType:
    """Return a generated class as a request describes it."""
    return _described_type(message_type.DESCRIPTOR)


@lru_cache(_MAX_DESCRIBED)
def _described_type(described: Descriptor) -> DescribedType:
    files = _files_of(described.file).SerializeToString()
    return DescribedType(described.full_name, files, hashlib.sha256(files).digest())


def unpack(message: pb.TypedMessage, message_type: type[M]) -> M:
    """Return the message in a TypedMessage, such as `Output.message` of the stubs.

    As in google.protobuf.Any, the part of `type_url` after the last slash counts. Raise WrongMessageType for another
    type, MessageMismatch for bytes that are not a message of it.
    """
    name, wanted = message.type_url.rpartition("/")[2], message_type.DESCRIPTOR.full_name
    if name != wanted:
        raise WrongMessageType(f"the message is a {name or 'message without a type'}, not a {wanted}")
    try:
        return message_type.FromString(message.value)
    except DecodeError:
        raise MessageMismatch(f"{len(message.value)} bytes are not a {wanted}") from None


def read_message(output: pb.Output, message_type: type[Message] | None) -> Message | None:
    """Return the message of an output; None if it has none. Raise InternalFailure if it has another type."""
    if message_type is None or not output.HasField("message"):
        return None
    try:
        return unpack(output.message, message_type)
    except MessageMismatch as error:
        problem = f"the server's message is not a {message_type.DESCRIPTOR.full_name}"
        raise InternalFailure(problem) from error


def cut_off(name: str, text: str, finish_reason: str) -> MessageMismatch:
    """Return the error for an output that ended before its type was complete."""
    problem = f"the output ended by {finish_reason} before its {name} was whole; {len(text)} characters came"
    return MessageMismatch(problem, text=text, finish_reason=finish_reason)


def parse_message(text: bytes | str, message_type: type[M]) -> M:
    """Parse JSON; a map's duplicate key keeps its last value, as in the server. Raise ParseError."""
    try:
        return ParseDict(json.loads(text), message_type())
    except ParseError:
        raise
    except Exception as error:  # as Parse does, since JSON that is not an object fails in many ways
        raise ParseError(f"{type(error).__name__}: {error}") from error


def _no_message_type(problem: str) -> InvalidRequest:
    return InvalidRequest(f"message_type: {problem}", field="message_type")


def _described(file: FileDescriptor) -> FileDescriptorProto:
    described = FileDescriptorProto()
    file.CopyToProto(described)
    return described


def _add_file(pool: DescriptorPool, files: dict[str, FileDescriptorProto], name: str) -> None:
    """Move a file into the pool, after its imports. Files that are not in `files` any more are in the pool already."""
    if (file := files.pop(name, None)) is not None:
        for imported in file.dependency:
            _add_file(pool, files, imported)
        pool.Add(file)


def _files_of(first: Any) -> FileDescriptorSet:
    files: dict[str, FileDescriptor] = {first.name: first}
    waiting: list[FileDescriptor] = [first]
    while waiting:
        for file in waiting.pop().dependencies:
            if file.name not in files and not file.name.startswith(_WELL_KNOWN):
                files[file.name] = file
                waiting.append(file)
    described = FileDescriptorSet()
    for file in files.values():
        file.CopyToProto(described.file.add())
    return described
