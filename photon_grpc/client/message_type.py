"""Typed output: a generated class described to the server, and its message read back."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.json_format import Parse
from google.protobuf.message import DecodeError, Message

from photon_grpc.errors import InternalFailure, InvalidRequest, RequestError
from photon_grpc.v1 import inference_pb2 as pb

M = TypeVar("M", bound=Message)

#: Files that the server has.
_WELL_KNOWN = "google/protobuf/"


class MessageMismatch(RequestError):
    """The answer is no whole message of the type."""

    reason = "MESSAGE_MISMATCH"


def write_message_type(target: pb.StructuredOutput.Protobuf, message_type: Any) -> None:
    """The class's file and all that it imports. Raise InvalidRequest for what is no generated class."""
    if not isinstance(message_type, type) or not issubclass(message_type, Message):
        raise InvalidRequest(f"message_type: {message_type!r} is no class of messages", field="message_type")
    target.file_descriptor_set = _files_of(message_type.DESCRIPTOR.file).SerializeToString()
    target.message_type = message_type.DESCRIPTOR.full_name


def read_message(output: pb.Output, message_type: type[Message] | None) -> Message | None:
    """The message of an output, None where it has none. Raise InternalFailure where it is of another type."""
    if message_type is None or not output.HasField("message"):
        return None
    message = message_type()
    try:
        is_of_type = output.message.Unpack(message)
    except DecodeError:
        is_of_type = False
    if not is_of_type:
        raise InternalFailure(f"the server's message is no {message_type.DESCRIPTOR.full_name}")
    return message


def parse_message(json: bytes | str, message_type: type[M]) -> M:
    """The message of an output's whole JSON. Raise ParseError."""
    return Parse(json, message_type())


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
