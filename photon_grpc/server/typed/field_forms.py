"""The forms of fields: values narrower than their types, and fields that must be present."""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor


class FieldForm(NamedTuple):
    """The values of one field, where they are narrower than its type."""

    #: A Lark terminal of one value, or of one entry of a list or map; empty: as the type says.
    value: str = ""
    #: A Lark terminal of a map's key with its colon; empty: as the type says.
    key: str = ""
    min_entries: int = 0
    #: None: the bound of all lists and maps.
    max_entries: int | None = None


class Slot(NamedTuple):
    """The place of one field in JSON, or of the fields of a oneof, of which one at most is there."""

    fields: tuple[FieldDescriptor, ...]
    is_required: bool


AS_TYPED = FieldForm()


class FieldForms:
    """The forms of all fields. Here each holds whatever its type allows."""

    def of(self, field: FieldDescriptor) -> FieldForm:
        """Return the form of a field."""
        return AS_TYPED

    def missing(self, message: Descriptor) -> frozenset[str]:
        """Return the names of the fields and oneofs that an empty `message` may not lack."""
        return frozenset()

    def slots(self, message: Descriptor) -> list[Slot]:
        """Return the slots in order of declaration."""
        missing = self.missing(message)
        found: dict[str, list[FieldDescriptor]] = {}
        for field in message.fields:
            group = field.containing_oneof
            found.setdefault(field.name if group is None else f"oneof {group.name}", []).append(field)
        return [_slot(fields, missing) for fields in found.values()]


BY_TYPE = FieldForms()


def _slot(fields: list[FieldDescriptor], missing: frozenset[str]) -> Slot:
    needed = [field for field in fields if field.is_required or field.name in missing]
    group = fields[0].containing_oneof
    return Slot(tuple(needed or fields), bool(needed) or (group is not None and group.name in missing))
