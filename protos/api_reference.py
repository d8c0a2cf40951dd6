"""Markdown tables of services, messages and enums, from descriptors that carry the protos' comments."""

from __future__ import annotations

from collections.abc import Iterator, Set

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

PACKAGE_PREFIXES = (".photon_grpc.v1.", ".photon_grpc.admin.v1.")

# Field numbers of descriptor.proto: the path of a declaration is made of them and of indices.
MESSAGE, ENUM, SERVICE = 4, 5, 6
FIELD, NESTED, ONEOF = 2, 3, 8
VALUE, METHOD = 2, 2

#: Before the comment of a declaration that the build does nothing with.
NOT_HERE = "**Not in this release.**"

Path = tuple[int, ...]
Comments = dict[Path, str]


def undocumented(descriptors: FileDescriptorSet) -> list[str]:
    """Full names of the declarations that have no comment."""
    missing: list[str] = []
    for file in descriptors.file:
        comments = comments_of(file)
        missing += [name for path, name in declarations(file) if not comments.get(path)]
    return missing


def render_reference(descriptors: FileDescriptorSet, absent: Set[str] = frozenset()) -> str:
    """The reference: one section for each file, services first. Ends with a newline. `absent` declarations are marked
    as such. Raise ValueError for one that there is not."""
    names = {name for file in descriptors.file for _, name in declarations(file)}
    if unknown := absent - names:
        raise ValueError(f"no declaration is called {', '.join(sorted(unknown))}")
    return "\n".join(line for file in descriptors.file for line in file_section(file, absent)) + "\n"


def comments_of(file: FileDescriptorProto) -> Comments:
    """Leading comments by path, in one line each."""
    return {
        tuple(location.path): " ".join(location.leading_comments.split())
        for location in file.source_code_info.location
        if location.leading_comments
    }


# What is declared, in the order of the source ---------------------------------------------------------------------


def declarations(file: FileDescriptorProto) -> Iterator[tuple[Path, str]]:
    """Path and name of everything that needs a comment."""
    for path, service in services_of(file):
        yield path, service.name
        yield from ((path + (METHOD, i), f"{service.name}.{m.name}") for i, m in enumerate(service.method))
    for path, name, message in messages_of(file):
        yield path, name
        yield from ((path + (FIELD, i), f"{name}.{f.name}") for i, f in enumerate(message.field))
        yield from ((path + (ONEOF, i), f"{name}.{message.oneof_decl[i].name}") for i in real_oneofs(message))
    for path, enum in enums_of(file):
        yield path, enum.name
        yield from ((path + (VALUE, i), f"{enum.name}.{v.name}") for i, v in enumerate(enum.value))


def services_of(file: FileDescriptorProto) -> Iterator[tuple[Path, ServiceDescriptorProto]]:
    return (((SERVICE, i), service) for i, service in enumerate(file.service))


def enums_of(file: FileDescriptorProto) -> Iterator[tuple[Path, EnumDescriptorProto]]:
    return (((ENUM, i), enum) for i, enum in enumerate(file.enum_type))


def messages_of(file: FileDescriptorProto) -> Iterator[tuple[Path, str, DescriptorProto]]:
    """Path, name within the package and descriptor of every message, each before those nested in it."""
    for i, message in enumerate(file.message_type):
        yield from with_nested((MESSAGE, i), message.name, message)


def with_nested(path: Path, name: str, message: DescriptorProto) -> Iterator[tuple[Path, str, DescriptorProto]]:
    yield path, name, message
    for i, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from with_nested(path + (NESTED, i), f"{name}.{nested.name}", nested)


def real_oneofs(message: DescriptorProto) -> list[int]:
    """Indices of the oneofs that the source names; `optional` fields make synthetic ones."""
    return sorted({f.oneof_index for f in message.field if f.HasField("oneof_index") and not f.proto3_optional})


# How it is written ------------------------------------------------------------------------------------------------


def file_section(file: FileDescriptorProto, absent: Set[str]) -> Iterator[str]:
    comments = comments_of(file)
    for path, name in declarations(file):
        if name in absent:
            comments[path] = f"{NOT_HERE} {comments[path]}"
    yield from (f"## {file.name}", "")
    for path, service in services_of(file):
        yield from service_section(comments, path, service)
    for path, name, message in messages_of(file):
        yield from message_section(comments, path, name, message)
    for path, enum in enums_of(file):
        yield from enum_section(comments, path, enum)


def service_section(comments: Comments, path: Path, service: ServiceDescriptorProto) -> Iterator[str]:
    yield from (f"### {service.name}", "", comments[path], "", "| call | request | response | what it does |")
    yield "|---|---|---|---|"
    for i, method in enumerate(service.method):
        yield row(f"`{method.name}`", *method_types(method), comments[path + (METHOD, i)])
    yield ""


def method_types(method: MethodDescriptorProto) -> tuple[str, str]:
    request, response = type_link(method.input_type), type_link(method.output_type)
    return (
        f"stream of {request}" if method.client_streaming else request,
        f"stream of {response}" if method.server_streaming else response,
    )


def message_section(comments: Comments, path: Path, name: str, message: DescriptorProto) -> Iterator[str]:
    yield from (f"### {name}", "", comments[path], "")
    if not message.field:
        return
    yield from ("| # | field | type | meaning |", "|---|---|---|---|")
    introduced: set[int] = set()
    for i, field in enumerate(message.field):
        chosen = field.HasField("oneof_index") and not field.proto3_optional
        if chosen and field.oneof_index not in introduced:
            introduced.add(field.oneof_index)
            oneof = message.oneof_decl[field.oneof_index].name
            yield row("", f"**{oneof}**", "oneof", comments[path + (ONEOF, field.oneof_index)])
        label = f"└ `{field.name}`" if chosen else f"`{field.name}`"
        yield row(str(field.number), label, field_type(field, message), comments[path + (FIELD, i)])
    yield ""


def field_type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    for entry in message.nested_type:
        if entry.options.map_entry and field.type_name.endswith(f"{message.name}.{entry.name}"):
            return f"map of {scalar_or_link(entry.field[0])} to {scalar_or_link(entry.field[1])}"
    name = scalar_or_link(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def scalar_or_link(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return type_link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def type_link(type_name: str) -> str:
    """Link to the section of one of our types; the bare name of another."""
    prefix = next((prefix for prefix in PACKAGE_PREFIXES if type_name.startswith(prefix)), None)
    if prefix is None:
        return f"`{type_name.removeprefix('.')}`"
    name = type_name.removeprefix(prefix)
    return f"[{name}](#{name.replace('.', '').lower()})"


def enum_section(comments: Comments, path: Path, enum: EnumDescriptorProto) -> Iterator[str]:
    yield from (f"### {enum.name}", "", comments[path], "", "| # | value | meaning |", "|---|---|---|")
    for i, value in enumerate(enum.value):
        yield row(str(value.number), f"`{value.name}`", comments[path + (VALUE, i)])
    yield ""


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
