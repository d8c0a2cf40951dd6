"""The rules of protovalidate in a set: its own library checks requests and answers by them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from photon_grpc.errors import AnswerInvalid, InvalidConstraint, InvalidRequest
from photon_grpc.server.services.rules.forms import RuleForms, custom_rules
from photon_grpc.server.typed.field_forms import BY_TYPE, FieldForms
from photon_grpc.server.typed.json_grammar import ValueBounds
from photon_grpc.server.typed.message_graph import reached_from, refused

#: The extensions of options that hold rules.
_OF_FIELDS, _OF_MESSAGES = "buf.validate.field", "buf.validate.message"
#: What the library says of a rule of CEL that fails.
_EVALUATED, _BUDGET = re.compile(r"error evaluating ([\w.-]+): "), ": Iteration budget exceeded"


class Rules:
    """The rules of all messages. Here there are none."""

    def forms(self, bounds: ValueBounds) -> FieldForms:
        """Return what the grammar of an answer holds; `bounds` are of what has none of its own."""
        return BY_TYPE

    def compile(self, root: Descriptor) -> None:
        """Compile the rules of `root` and all that it holds. Raise InvalidConstraint."""

    def check_request(self, request: Message) -> None:
        """Raise InvalidRequest if `request` breaks a rule."""

    def check_answer(self, answer: Message) -> None:
        """Raise AnswerInvalid if `answer` breaks a rule."""

    def only_checked(self, root: Descriptor, forms: FieldForms) -> list[str]:
        """Return the rules of answers that no grammar holds, as "field: rule"."""
        return []


NO_RULES = Rules()


class _Library(Protocol):
    """The library's Validator."""

    def collect_violations(self, message: Any, *, fail_fast: bool = False) -> list[Any]: ...


class CheckedRules(Rules):
    """The rules of a pool's files, as the pool's own version of buf/validate/validate.proto describes them."""

    def __init__(self, pool: DescriptorPool, library: _Library, evaluation_error: type[Exception]) -> None:
        self._pool = pool
        self._library = library
        self._evaluation_error = evaluation_error
        #: Messages -> why a rule of theirs does not compile.
        self._problems: dict[str, str] = {}

    def forms(self, bounds: ValueBounds) -> FieldForms:
        return RuleForms(self._rules_of, self._missing, bounds)

    def compile(self, root: Descriptor) -> None:
        for message in reached_from(root):
            if message.full_name not in self._problems:
                self._problems[message.full_name] = self._problem(message)
            if problem := self._problems[message.full_name]:
                raise refused(f"{message.full_name} has rules that do not compile: {problem}")

    def _problem(self, message: Descriptor) -> str:
        """Return why a rule of `message` does not compile; "" if all do."""
        try:
            self._library.collect_violations(GetMessageClass(message)())
        except self._evaluation_error:  # a rule of CEL that an empty message cannot be checked by
            return ""
        except Exception as error:  # a rule that does not compile; a version of the rules that the library cannot read
            return str(error)[:300]
        return ""

    def check_request(self, request: Message) -> None:
        broken = self._first_broken(request)
        if broken is not None:
            field, text = broken
            raise InvalidRequest(f"{field}: {text}" if field else f"the request: {text}", field=field)

    def check_answer(self, answer: Message) -> None:
        broken = self._first_broken(answer)
        if broken is not None:
            field, text = broken
            raise AnswerInvalid(f"the answer breaks a rule of {field or 'its message'}: {text}", field=field)

    def only_checked(self, root: Descriptor, forms: FieldForms) -> list[str]:
        found = [f"{message.full_name}: {each}" for message in reached_from(root) for each in self._of_message(message)]
        return found + (forms.unheld if isinstance(forms, RuleForms) else [])

    def _first_broken(self, message: Message) -> tuple[str, str] | None:
        """Return a field's path and the rule with its text; None if all rules are kept."""
        try:
            violations = self._library.collect_violations(message, fail_fast=True)
        except Exception as error:  # a rule of CEL that divides by zero, for example; the text may quote the message
            return "", _unevaluated(error)
        if not violations:
            return None
        first = violations[0].proto
        return _path(first.field), f"{first.message or 'is not valid'} [{first.rule_id}]"

    def _rules_of(self, field: FieldDescriptor) -> Any:
        return self._extension(field, "google.protobuf.FieldOptions", _OF_FIELDS)

    def _of_message(self, message: Descriptor) -> Iterator[str]:
        rules = self._extension(message, "google.protobuf.MessageOptions", _OF_MESSAGES)
        yield from custom_rules(rules)
        for each in getattr(rules, "oneof", ()):
            yield f"oneof of {', '.join(each.fields)}"

    def _extension(self, described: Any, options_name: str, name: str) -> Any:
        """Return an option as the pool describes it; None if it is not set."""
        data = described.GetOptions().SerializeToString()
        if not data:
            return None
        try:
            options: Any = GetMessageClass(self._pool.FindMessageTypeByName(options_name)).FromString(data)
        except DecodeError:
            raise refused(f"{described.full_name} has options that cannot be parsed") from None
        extension = self._pool.FindExtensionByName(name)
        return options.Extensions[extension] if options.HasExtension(extension) else None

    def _missing(self, message: Descriptor) -> Iterator[str]:
        """Yield the fields and oneofs that an empty message lacks."""
        try:
            violations = self._library.collect_violations(GetMessageClass(message)())
        except self._evaluation_error:
            return
        for violation in violations:
            field = violation.proto.field
            if field is not None and len(field.elements) == 1:
                yield field.elements[0].field_name


def read_rules(pool: DescriptorPool) -> Rules:
    """Return the rules of a pool's files. Raise InvalidConstraint if they cannot be checked here."""
    try:
        extension: Any = pool.FindExtensionByName(_OF_FIELDS)
    except KeyError:
        return NO_RULES
    if extension.message_type is None or "type" not in extension.message_type.oneofs_by_name:
        raise InvalidConstraint(f"its {_OF_FIELDS} is not that of protovalidate")
    try:
        from protovalidate import EvaluationError, Validator
    except ImportError:
        raise InvalidConstraint("its rules of protovalidate need its library: pip install protovalidate") from None
    return CheckedRules(pool, Validator(), EvaluationError)


def _unevaluated(error: Exception) -> str:
    """Return the rule that cannot be evaluated, and whether it takes too much work."""
    found = _EVALUATED.match(str(error))
    rule = f"the rule [{found[1]}]" if found else "a rule"
    why = "it takes too many steps" if str(error).endswith(_BUDGET) else type(error).__name__
    return f"{rule} cannot be evaluated: {why}"


def _path(path: Any) -> str:
    """Return a field's path, with the places of lists; the keys of maps are left out, as callers wrote them."""
    parts = []
    for element in getattr(path, "elements", ()):
        at = element.subscript
        place = "" if at is None else f"[{at.value}]" if at.field == "index" else "[…]"
        parts.append(f"{element.field_name}{place}")
    return ".".join(parts)
