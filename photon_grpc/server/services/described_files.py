"""The files of descriptor sets in a pool of their own, with their comments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from photon_grpc.config.service_files import FLAG, ServiceFile
from photon_grpc.errors import ConfigError, InvalidConstraint
from photon_grpc.server.typed.message_graph import FIELD, WELL_KNOWN_FILES
from photon_grpc.server.typed.message_type import pool_of
from photon_grpc.server.wire import descriptors

_PROTOBUF = "google.protobuf"
#: Packages in which only their owners define anything.
_FORBIDDEN = ("photon_grpc", "grpc", _PROTOBUF, "xds")
#: Those of them whose files everybody imports, such as the options of grpc-gateway and the annotations of xds.
_IMPORTED = ("grpc", "xds")
_OURS = {file.name: file for file in descriptors.ALL}
#: What must be equal in another copy of our files.
_FACTS = {
    "field": ("name", "number", "label", "type", "type_name"),
    "extension": ("name", "number", "extendee", "type_name"),
    "method": ("name", "input_type", "output_type", "client_streaming", "server_streaming"),
}
#: Numbers of the lists in FileDescriptorProto and below it, which paths of comments consist of.
_LISTS = {
    FileDescriptorProto: {4: "message_type", 5: "enum_type", 6: "service", 7: "extension"},
    "DescriptorProto": {2: "field", 3: "nested_type", 4: "enum_type", 6: "extension", 8: "oneof_decl"},
    "EnumDescriptorProto": {2: "value"},
    "ServiceDescriptorProto": {2: "method"},
}


class DescribedFiles:
    """All files of all sets. Raises ConfigError naming the set and the file."""

    def __init__(self, sets: Iterable[ServiceFile]) -> None:
        #: File names -> files without comments.
        self.files: dict[str, FileDescriptorProto] = {}
        #: Full names of services, messages, fields, methods and values -> comments.
        self.comments: dict[str, str] = {}
        #: Paths of sets without source info.
        self.without_comments: list[str] = []
        #: Paths of sets -> the full names of their services.
        self.services: dict[str, list[str]] = {}
        for each in sets:
            try:
                self._add(each)
            except (TypeError, UnicodeError):  # protobuf returns such a text as bytes
                raise bad_service(f"{each.path}: a name or a comment in it is not UTF-8") from None
        self.pool = _pool(self.files)

    def _add(self, given: ServiceFile) -> None:
        parsed = _parsed(given)
        if not any(file.source_code_info.location for file in parsed.file):
            self.without_comments.append(given.path)
        found = self.services.setdefault(given.path, [])
        for file in parsed.file:
            for name, comment in _comments(file):
                self.comments.setdefault(name, comment)
            file.ClearField("source_code_info")
            if any(isinstance(field.json_name, bytes) for _, field in fields_in(file)):
                raise UnicodeError
            self._check(given.path, file)
            if file.name not in WELL_KNOWN_FILES:
                self.files[file.name] = file
            if not _is_forbidden(file.package):
                found += [_joined(file.package, service.name) for service in file.service]
        if not parsed.file:
            raise bad_service(f"{given.path}: the set is empty")

    def _check(self, path: str, file: FileDescriptorProto) -> None:
        known = self.files.get(file.name)
        if known is not None and known != file:
            raise bad_service(f"{path}: its file {file.name!r} differs from another one of this name")
        if file.name in WELL_KNOWN_FILES:
            if file.package != _PROTOBUF:
                raise bad_service(
                    f"{path}: its file {file.name!r} has a name of protobuf's, in the package {file.package!r}"
                )
            return
        if _is_forbidden(file.package):
            whose = f"is in the package {file.package}, which is not yours"
            ours = _OURS.get(file.name)
            if ours is None and not file.service and _is_in(file.package, _IMPORTED):
                return
            if ours is None:
                raise bad_service(f"{path}: its file {file.name!r} {whose}")
            unknown = next(_not_in(ours, file), "")
            if unknown:
                raise bad_service(f"{path}: its file {file.name!r} {whose}, and this server's has no such {unknown}")


def fields_in(file: FileDescriptorProto) -> Iterator[tuple[str, FieldDescriptorProto]]:
    """Yield every field of a file with its full name."""
    scope = f"{file.package}." if file.package else ""
    yield from ((f"{scope}{field.name}", field) for field in file.extension)
    waiting: list[tuple[str, DescriptorProto]] = [(f"{scope}{message.name}", message) for message in file.message_type]
    while waiting:
        name, message = waiting.pop()
        yield from ((f"{name}.{field.name}", field) for field in (*message.field, *message.extension))
        waiting += [(f"{name}.{nested.name}", nested) for nested in message.nested_type]


def bad_service(problem: str) -> ConfigError:
    return ConfigError(f"{FLAG} {problem}", field=FLAG)


def reason_of(error: InvalidConstraint) -> str:
    """Return the text of an error without the field of a request, which there is none of at start."""
    return str(error).removeprefix(f"{FIELD}: ")


def _parsed(given: ServiceFile) -> FileDescriptorSet:
    try:
        parsed = FileDescriptorSet.FromString(given.data)
    except DecodeError:
        raise bad_service(f"{given.path}: is not a serialized google.protobuf.FileDescriptorSet") from None
    names = [file.name for file in parsed.file]
    twice = next((name for name in names if names.count(name) > 1), None) if len({*names}) < len(names) else None
    if twice is not None:
        raise bad_service(f"{given.path}: the file {twice!r} is in it {names.count(twice)} times")
    if not all(names):
        raise bad_service(f"{given.path}: is not a serialized google.protobuf.FileDescriptorSet: a file has no name")
    return parsed


def _pool(files: dict[str, FileDescriptorProto]) -> DescriptorPool:
    try:
        return pool_of(files)
    except InvalidConstraint as error:
        reason = reason_of(error)
        remedy = " (protoc --include_imports)" if "which is not in it" in reason else ""
        raise bad_service(f"the files do not fit together: {reason}{remedy}") from None


def _is_forbidden(package: str) -> bool:
    return _is_in(package, _FORBIDDEN)


def _is_in(package: str, packages: Iterable[str]) -> bool:
    return any(package == each or package.startswith(f"{each}.") for each in packages)


def _not_in(ours: Any, theirs: Any, scope: str = "") -> Iterator[str]:
    """Yield the names of what `theirs` declares otherwise than `ours`, or beyond it; an older copy of ours is fine."""
    for kind in ("message_type", "nested_type", "service"):
        known = {each.name: each for each in getattr(ours, kind, ())}
        for each in getattr(theirs, kind, ()):
            if each.name in known:
                yield from _not_in(known[each.name], each, f"{scope}{each.name}.")
            else:
                yield f"{scope}{each.name}"
    for kind, facts in _FACTS.items():
        same = {tuple([getattr(each, fact) for fact in facts]) for each in getattr(ours, kind, ())}
        for each in getattr(theirs, kind, ()):
            if tuple([getattr(each, fact) for fact in facts]) not in same:
                yield f"{scope}{each.name}"


def _comments(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    for location in file.source_code_info.location:
        text = (location.leading_comments or location.trailing_comments).strip()
        name = _named(file, tuple(location.path)) if text else ""
        if name:
            yield name, " ".join(text.split())


def _named(file: FileDescriptorProto, path: tuple[int, ...]) -> str:
    """Return the full name of what a path of source info leads to; "" if that is none of what comments are read of."""
    holder: Any = file
    name = file.package
    if not path or len(path) % 2:
        return ""
    for number, index in zip(path[::2], path[1::2], strict=True):
        lists = _LISTS.get(FileDescriptorProto if holder is file else type(holder).DESCRIPTOR.name, {})
        entries = getattr(holder, lists[number]) if number in lists else ()
        if not 0 <= index < len(entries):
            return ""
        holder = entries[index]
        name = _joined(name, holder.name)
    return name


def _joined(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name
