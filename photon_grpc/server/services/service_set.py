"""The services of operators' descriptor sets: which of their methods are served, and why others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.json_format import Parse, ParseError
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from photon_grpc.config.service_files import ServiceFile
from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.errors import ConfigError, InvalidConstraint
from photon_grpc.frontend.constraints.trial import try_out
from photon_grpc.server.services.described_files import DescribedFiles, bad_service, fields_in, reason_of
from photon_grpc.server.services.examples import ExampleText
from photon_grpc.server.services.model_options import MethodOptions, options_by_method, read_options
from photon_grpc.server.services.request_text import RequestText
from photon_grpc.server.services.rules.rules import NO_RULES, Rules, read_rules
from photon_grpc.server.services.shared_prompt import shared_prompt
from photon_grpc.server.typed.field_forms import FieldForms
from photon_grpc.server.typed.message_graph import WELL_KNOWN_FILES
from photon_grpc.server.typed.message_type import grammar_of, in_order
from photon_grpc.v1 import service_pb2
from photon_grpc.v1.service_pb2 import ModelOptions

#: How deep the messages of an answer nest, unless it requires more.
MAX_DEPTH = 8
#: Of a method's description, for each token of the context: a third of it or less.
_CHARS_PER_TOKEN = 1
_MAX_DESCRIPTION_CHARS = 2**16
#: Of all that stands before a request: what a token of plain English holds.
_MOST_CHARS_PER_TOKEN = 4
#: The extension of FieldOptions that holds the rules of protoc-gen-validate, which came before protovalidate.
_PROTOC_GEN_VALIDATE = 1071
_MAX_LISTED = 10
_SKIP = "--service-skip"


@dataclass(frozen=True, slots=True, eq=False)
class ServedMethod:
    """One method of a caller's service, and what an answer to it needs."""

    service: str
    name: str
    is_stream: bool
    request_class: type[Message]
    response_class: type[Message]
    constraint: ConstraintAsk
    #: What stands before every request in the prompt.
    shared_prompt: str
    request_text: RequestText
    options: MethodOptions
    #: Those of protovalidate, for requests and answers.
    rules: Rules = NO_RULES

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def parsed_request(self, text: str) -> Message:
        """Return the request in proto3 JSON. Raise ConfigError."""
        try:
            return Parse(text, self.request_class())
        except ParseError as error:
            raise ConfigError(f"the request is not a {self.request_class.DESCRIPTOR.full_name}: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class ServiceSet:
    """All services that are served beside ours."""

    methods: tuple[ServedMethod, ...] = ()
    #: Their files, each after those that it imports, for reflection.
    files: tuple[FileDescriptorProto, ...] = ()
    #: Lines for the operator.
    warnings: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of the services, in order of their files."""
        return tuple(dict.fromkeys(method.service for method in self.methods))


NO_SERVICES = ServiceSet()


def read_services(given: Iterable[ServiceFile], *, skip: bool = False, max_context_tokens: int = 2**20) -> ServiceSet:
    """Return the wanted services. Raise ConfigError naming the methods that cannot be served, unless `skip` is set.

    `max_context_tokens` is the model's, of which the description of a method takes a third or less.
    """
    sets = tuple(given)
    if not sets:
        return NO_SERVICES
    described = DescribedFiles(sets)
    hidden = frozenset(_hidden_fields(described.files.values()))
    options = options_by_method(described.files)
    rules = _rules(described)
    methods: list[ServedMethod] = []
    problems: list[str] = []
    only_checked: dict[str, None] = {}
    for descriptor in _wanted(sets, described):
        try:
            given_options = options[descriptor.full_name]
            made, unheld = _served(descriptor, described, hidden, given_options, max_context_tokens, rules)
        except InvalidConstraint as error:
            problems.append(f"{descriptor.full_name}: {reason_of(error)}")
        else:
            methods.append(made)
            only_checked |= dict.fromkeys(unheld)
    if problems and not skip:
        raise _cannot_serve(problems)
    warnings = (*_warnings(described), *_only_checked(only_checked), *_skipped(problems))
    return ServiceSet(tuple(methods), _in_order(described), warnings)


def _rules(described: DescribedFiles) -> Rules:
    try:
        return read_rules(described.pool)
    except InvalidConstraint as error:
        raise bad_service(reason_of(error)) from None


def _wanted(sets: Iterable[ServiceFile], described: DescribedFiles) -> Iterator[Any]:
    """Yield the methods of the services that are wanted. Raise ConfigError for a service that there is not."""
    names: dict[str, None] = {}
    for each in sets:
        found = described.services[each.path]
        for name in each.services:
            if name not in found:
                there = ", ".join(found[:_MAX_LISTED]) or "no service"
                raise bad_service(f"{each.path}:{name}: the set has no such service; it has {there}")
        if not found:
            raise bad_service(f"{each.path}: the set has no service")
        names |= dict.fromkeys(each.services or found)
    for name in names:
        service: Any = described.pool.FindServiceByName(name)
        twice = next((each for each, count in Counter(each.name for each in service.methods).items() if count > 1), "")
        if twice:
            raise bad_service(f"{name} has two methods of the name {twice}")
        yield from service.methods


def _served(
    descriptor: Any,
    described: DescribedFiles,
    hidden: frozenset[str],
    given: ModelOptions,
    max_context_tokens: int,
    rules: Rules,
) -> tuple[ServedMethod, list[str]]:
    """Return the method, and the rules that its grammar does not hold. Raise InvalidConstraint."""
    if descriptor.client_streaming:
        raise InvalidConstraint("it takes a stream of requests; one request is answered at a time")

    def is_hidden(field: FieldDescriptor) -> bool:
        return field.full_name in hidden

    request, response = GetMessageClass(descriptor.input_type), GetMessageClass(descriptor.output_type)
    options = read_options(descriptor.full_name, given)
    for each in (descriptor.input_type, descriptor.output_type):
        rules.compile(each)
    forms = rules.forms(options.bounds)
    # Both refuse what the shared part could not be made of.
    grammar = _grammar(descriptor, described, options, forms)
    request_text = RequestText(descriptor.input_type, described.pool, is_hidden)
    answer_text = RequestText(descriptor.output_type, described.pool, is_hidden)
    asked = ExampleText(request, request_text, rules.check_request)
    answered = ExampleText(response, answer_text, rules.check_answer)
    examples = tuple([(asked.request(each), answered.answer(answer)) for each, answer in options.examples])
    made = ServedMethod(
        service=descriptor.containing_service.full_name,
        name=descriptor.name,
        is_stream=descriptor.server_streaming,
        request_class=request,
        response_class=response,
        constraint=ConstraintAsk("protobuf", grammar),
        shared_prompt=_shared(descriptor, described, is_hidden, options, max_context_tokens),
        request_text=request_text,
        options=replace(options, examples=examples),
        rules=rules,
    )
    return made, rules.only_checked(descriptor.output_type, forms)


def _shared(
    descriptor: Any,
    described: DescribedFiles,
    is_hidden: Callable[[FieldDescriptor], bool],
    options: MethodOptions,
    max_context_tokens: int,
) -> str:
    """Return the shared part of the method's prompts. Raise InvalidConstraint if the context has no room for it."""
    prefix = f"{options.cache_prefix}\n\n" if options.cache_prefix else ""
    room = max_context_tokens * _MOST_CHARS_PER_TOKEN - len(prefix)
    max_chars = min(max_context_tokens * _CHARS_PER_TOKEN, _MAX_DESCRIPTION_CHARS, room)
    own = options.system or shared_prompt(
        descriptor, described.comments, is_hidden, is_stream=descriptor.server_streaming, max_chars=max_chars
    )
    if len(own) > room:
        what = "option system" if options.system else "the shortest description of its messages"
        before = f"option cache_prefix has {len(options.cache_prefix)} characters and " if prefix else ""
        raise InvalidConstraint(
            f"{before}{what} has {len(own)} characters; a context of {max_context_tokens} tokens has room for about "
            f"{max_context_tokens * _MOST_CHARS_PER_TOKEN}",
            needed=len(prefix) + len(own),
            limit=max_context_tokens * _MOST_CHARS_PER_TOKEN,
        )
    return prefix + own


def _grammar(descriptor: MethodDescriptor, described: DescribedFiles, options: MethodOptions, forms: FieldForms) -> str:
    """Return the grammar of the method's answers. Raise InvalidConstraint if there is none, or it does not compile."""
    max_messages = options.max_messages if descriptor.server_streaming else None
    grammar = grammar_of(
        descriptor.output_type,
        described.pool,
        forms,
        bounds=options.bounds,
        max_messages=max_messages,
        max_depth=MAX_DEPTH,
    )
    try:
        try_out(ConstraintAsk("protobuf", grammar))
    except InvalidConstraint as error:
        problem = str(error).removeprefix(f"{error.field}: ")
        raise InvalidConstraint(f"the grammar of its answers cannot be used: {problem}") from None
    return grammar


def _cannot_serve(problems: list[str]) -> ConfigError:
    more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
    listed = "; ".join(problems[:_MAX_LISTED])
    return bad_service(f"{len(problems)} methods cannot be served ({_SKIP} leaves them out): {listed}{more}")


def _skipped(problems: list[str]) -> Iterator[str]:
    for problem in problems:
        yield f"not served: {problem}"


def _warnings(described: DescribedFiles) -> Iterator[str]:
    for path in described.without_comments:
        yield (
            f"{path} has no source info, so no comment reaches the prompts: make it with buf build -o, or with protoc "
            "--include_imports --include_source_info"
        )
    ruled = [each for file in described.files.values() for each in _older_rules(file)]
    if ruled:
        yield (
            f"rules of protoc-gen-validate are not enforced, such as that of {ruled[0]} ({len(ruled)} fields have "
            "some); those of protovalidate are"
        )


def _only_checked(rules: Iterable[str]) -> Iterator[str]:
    """Yield a line for the rules that only a whole answer can be checked by."""
    listed = sorted(rules)
    if listed:
        more = f"; and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
        yield (
            "an answer is not held to these rules while it is written, and fails with ANSWER_INVALID if it breaks one: "
            f"{'; '.join(listed[:_MAX_LISTED])}{more}"
        )


def _in_order(described: DescribedFiles) -> tuple[FileDescriptorProto, ...]:
    """Return the files and those of protobuf without our options, each after its imports; there is no circle."""
    files = [
        described.files.get(name) or FileDescriptorProto.FromString(WELL_KNOWN_FILES[name])
        for name in in_order(described.files, [*described.files])
    ]
    return tuple([_without_prompts(file) for file in files])


def _without_prompts(file: FileDescriptorProto) -> FileDescriptorProto:
    """Return the file without what operators tell the model, which is nothing for callers."""
    shown = FileDescriptorProto()
    shown.CopyFrom(file)
    for service in shown.service:
        service.options.ClearExtension(service_pb2.service_model)
        for method in service.method:
            method.options.ClearExtension(service_pb2.model)
    return shown


def _hidden_fields(files: Iterable[FileDescriptorProto]) -> Iterator[str]:
    """Yield the full names of fields that reach no prompt and no log."""
    return (name for file in files for name, field in fields_in(file) if _is_hidden(field))


def _is_hidden(field: FieldDescriptorProto) -> bool:
    return field.options.debug_redact or field.options.Extensions[service_pb2.hidden]


def _older_rules(file: FileDescriptorProto) -> Iterator[str]:
    for name, field in fields_in(file):
        if field.HasField("options") and any(
            each.field_number == _PROTOC_GEN_VALIDATE
            for each in UnknownFieldSet(field.options)  # type: ignore[attr-defined]  # its stub lacks __iter__
        ):
            yield name
