"""The forms of fields with rules: what the grammar of an answer holds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.trial import try_out
from photon_grpc.server.services.rules import texts, values
from photon_grpc.server.typed.field_forms import AS_TYPED, FieldForm, FieldForms
from photon_grpc.server.typed.json_grammar import ValueBounds
from photon_grpc.server.typed.message_graph import entry_field, is_map, refused, value_of

#: A value of buf.validate.Ignore.
_ALWAYS = "IGNORE_ALWAYS"
#: Types of fields -> the kinds of their rules, where fields have only rules of every kind.
_KINDS = {
    getattr(FieldDescriptor, f"TYPE_{kind.upper()}"): kind
    for kind in (*values.INTEGERS, "float", "double", "bool", "string", "bytes", "enum")
}


class RuleForms(FieldForms):
    """The forms of all fields. Raises InvalidConstraint for a field whose rules no value keeps.

    Args:
        rules_of: returns a field's rules, a buf.validate.FieldRules, or None.
        missing_of: returns the names of what an empty message lacks by its rules.
        bounds: of what has none of its own.
    """

    def __init__(
        self,
        rules_of: Callable[[FieldDescriptor], Any],
        missing_of: Callable[[Descriptor], Iterable[str]],
        bounds: ValueBounds,
    ) -> None:
        self._rules_of = rules_of
        self._missing_of = missing_of
        self._bounds = bounds
        self._forms: dict[str, FieldForm] = {}
        self._missing: dict[str, frozenset[str]] = {}
        #: Rules that are only checked, as "field: rule".
        self.unheld: list[str] = []

    def of(self, field: FieldDescriptor) -> FieldForm:
        if field.full_name not in self._forms:
            self._forms[field.full_name] = self._form(field)
        return self._forms[field.full_name]

    def missing(self, message: Descriptor) -> frozenset[str]:
        if message.full_name not in self._missing:
            self._missing[message.full_name] = frozenset(self._missing_of(message))
            for group in message.oneofs:
                if sum(field.name in self._missing[message.full_name] for field in group.fields) > 1:
                    raise refused(f"{group.full_name}: two fields of a oneof are required")
        return self._missing[message.full_name]

    def _form(self, field: FieldDescriptor) -> FieldForm:
        rules = self._rules_of(field)
        if rules is None or _is_ignored(rules):
            return AS_TYPED
        self._note_custom(field, rules)
        given = _set_rules(rules)
        if getattr(rules, "required", False) and field.is_repeated:
            what = "min_pairs" if is_map(field) else "min_items"
            given[what] = max(given.get(what, 0), 1)
        if is_map(field):
            key = self._key(field, given.get("keys"))
            least, most = self._num_entries(field, given, "pairs", {"keys", "values"})
            num_keys = (1 if key else 2) if entry_field(field, "key").type == FieldDescriptor.TYPE_BOOL else None
            if num_keys is not None and least > num_keys:
                raise refused(f"{field.full_name}: a map with {num_keys} possible keys has fewer than {least} pairs")
            return FieldForm(self._value(value_of(field), given.get("values"), field), key, least, most)
        if field.is_repeated:
            form = self._num_entries(field, given, "items", {"items"})
            return FieldForm(self._value(field, given.get("items"), field), "", *form)
        return FieldForm(self._value(field, rules, field))

    def _num_entries(
        self, field: FieldDescriptor, given: Mapping[str, Any], what: str, held: set[str]
    ) -> tuple[int, int | None]:
        least, most = given.get(f"min_{what}", 0), given.get(f"max_{what}")
        for name in given.keys() - held - {f"min_{what}", f"max_{what}"}:
            if given[name] is not False:
                self._unheld(field, name)
        if what == "pairs" and least > 1 and entry_field(field, "key").type != FieldDescriptor.TYPE_BOOL:
            self._unheld(field, "min_pairs")  # a parser joins equal keys
        if most is not None and most < least:
            raise refused(f"{field.full_name}: no number of entries is from {least} to {most}")
        return least, most

    def _key(self, field: FieldDescriptor, rules: Any) -> str:
        key = entry_field(field, "key")
        value = self._value(key, rules, field, is_key=True)
        # The slash within an expression is escaped, so this one ends it.
        return value.replace('"/', '":/')

    def _value(self, field: FieldDescriptor, rules: Any, holder: FieldDescriptor, *, is_key: bool = False) -> str:
        """Return the terminal of one value; "" if its rules do not narrow it."""
        if rules is None or _is_ignored(rules):
            return ""
        kind, given = rules.WhichOneof("type") or _KINDS.get(field.type, ""), _set_rules(rules)
        if getattr(rules, "required", False) and not (field.has_presence or field.is_repeated):
            given = _without_zero(kind, given)
        if field is not holder or holder.is_repeated:
            self._note_custom(holder, rules)

        try:
            terminal, unheld, problem = self._widened(kind, field, given, is_key=is_key)
            if problem and "pattern" in given:
                del given["pattern"]
                terminal, unheld, problem = self._widened(kind, field, given, is_key=is_key)
                unheld.append("pattern")
        except values.Unsatisfiable:
            raise _contradiction(holder, "they contradict each other") from None
        if problem:
            raise _contradiction(holder, problem)
        for name in unheld:
            self._unheld(holder, f"{kind}.{name}")
        return terminal

    def _widened(
        self, kind: str, field: FieldDescriptor, given: Mapping[str, Any], *, is_key: bool
    ) -> tuple[str, list[str], str]:
        """Return the terminal, the rules that it does not hold, and why no text has its form.

        Where the rules ask for a longer text than the default bound, it gives way, doubled until one is long enough.
        """
        max_chars = self._bounds.chars
        while True:
            unheld: list[str] = []
            terminal = self._terminal(kind, field, given, max_chars, unheld.append, is_key=is_key)
            problem = _problem(terminal) if terminal else ""
            if not problem or kind != "string" or max_chars >= texts.MAX_CHARS:
                return terminal, unheld, problem
            max_chars *= 2

    def _terminal(
        self,
        kind: str,
        field: FieldDescriptor,
        given: Mapping[str, Any],
        max_chars: int,
        unheld: Callable[[str], None],
        *,
        is_key: bool,
    ) -> str:
        if not given:
            return ""
        if kind in values.INTEGERS:
            return values.integer(kind, given, unheld, is_key=is_key)
        match kind:
            case "string":
                return texts.string(given, max_chars, unheld)
            case "bytes":
                return texts.string_bytes(given, max_chars, unheld)
            case "float" | "double":
                return values.number(kind, given, unheld)
            case "bool":
                return values.boolean(given, unheld, is_key=is_key)
            case "enum" if field.enum_type is not None:
                return values.enum_value(field.enum_type, given, unheld)
            case "duration":
                return values.duration(given, unheld)
            case "timestamp":
                return values.timestamp(given, unheld)
        for name in given:
            unheld(name)
        return ""

    def _note_custom(self, field: FieldDescriptor, rules: Any) -> None:
        self.unheld += [f"{field.full_name}: {each}" for each in custom_rules(rules)]

    def _unheld(self, field: FieldDescriptor, name: str) -> None:
        self.unheld.append(f"{field.full_name}: {name}")


def custom_rules(rules: Any) -> list[str]:
    """Return the names of CEL rules."""
    named = [f"cel {each.id or each.expression}" for each in getattr(rules, "cel", ())]
    return named + [f"cel {each}" for each in getattr(rules, "cel_expression", ())]


def _set_rules(rules: Any) -> dict[str, Any]:
    """Return the standard rules of a field by name; those of extensions by their full name."""
    kind = rules.WhichOneof("type")
    if kind is None:
        return {}
    found = getattr(rules, kind).ListFields()
    return {_name(rule): value for rule, value in found if rule.name != "example"}


def _without_zero(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the rules with one more, that a value is not the default of its type."""
    if kind in ("string", "bytes"):
        return {**given, "min_len": max(given.get("min_len", 0), 1)}
    if kind == "bool":
        return {**given, "const": True}
    return {**given, "not_in": [*given.get("not_in", ()), 0]}


def _name(rule: FieldDescriptor) -> str:
    return rule.full_name if rule.is_extension else rule.name


def _is_ignored(rules: Message) -> bool:
    ignore: Any = rules.DESCRIPTOR.fields_by_name.get("ignore")  # which the first versions lack
    if ignore is None or ignore.enum_type is None:
        return False
    number = getattr(rules, "ignore", 0)
    return any(value.number == number and value.name == _ALWAYS for value in ignore.enum_type.values)


@lru_cache(1024)
def _problem(terminal: str) -> str:
    """Return why no text has the form of a terminal; "" if one has."""
    try:
        try_out(ConstraintAsk("protobuf", f"start: VALUE\nVALUE: {terminal}"))
    except InvalidConstraint as error:
        return str(error)[:200]
    return ""


def _contradiction(field: FieldDescriptor, why: str) -> InvalidConstraint:
    return refused(f"{field.full_name}: no value keeps all of its rules ({why})")
