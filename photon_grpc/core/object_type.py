"""A caller's class for answers: the JSON Schema that constrains them, and how objects are read from them.

Standard library only: the client installs without Pydantic, which is only used for its own model classes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from photon_grpc.core.dataclass_schema import dataclass_shape
from photon_grpc.errors import InvalidRequest

#: Options whose given value makes the text something other than the JSON of an object.
_OTHER_TEXT: tuple[tuple[str, Any], ...] = (
    ("text", False),
    ("include_stop_in_text", True),
    ("skip_special_tokens", False),
)


@dataclass(frozen=True, slots=True)
class ObjectType:
    """A Pydantic model class or a dataclass."""

    name: str
    #: JSON Schema. The text is the same every time, since servers cache what they compile.
    schema: str
    #: Reads an object from JSON text. Raises ValueError or TypeError if it does not fit the class.
    read: Callable[[str], Any]


def object_type_of(options: Mapping[str, Any]) -> ObjectType | None:
    """Return the type for `json_schema` if it is a class, else None.

    Raise InvalidRequest for options that do not go with it, TypeError for a field without a schema and for an object in
    place of its class.
    """
    given = options.get("json_schema")
    _check_not_an_object(given)
    if not isinstance(given, type):
        return None
    for name, value in _OTHER_TEXT:
        if options.get(name) is value:
            raise InvalidRequest(f"{name}={value}: a {given.__name__} is read from the whole text", field=name)
    continued: Any = options.get("continue_from")
    if hasattr(continued, "__len__") and len(continued):
        message = f"continue_from: a {given.__name__} is read from the whole text; give its schema as text instead"
        raise InvalidRequest(message, field="continue_from")
    return _object_type(given)


def _check_not_an_object(given: Any) -> None:
    """Raise TypeError for an object in place of its class, and for list[Model]."""
    if typing.get_origin(given) is not None:
        raise TypeError(
            f"json_schema: {given} is not a class; pass a model class or dataclass with a field of this type"
        )
    name = type(given).__name__
    if not isinstance(given, type) and (hasattr(given, "__pydantic_validator__") or dataclasses.is_dataclass(given)):
        raise TypeError(f"json_schema: this is an object of {name}; pass the class: json_schema={name}")


@lru_cache(maxsize=64)
def _object_type(cls: type) -> ObjectType:
    if hasattr(cls, "__pydantic_validator__"):
        return _of_pydantic(cls)
    if dataclasses.is_dataclass(cls):
        shape = dataclass_shape(cls)
        return ObjectType(cls.__name__, json.dumps(shape.schema), lambda text: shape.read(json.loads(text)))
    message = f"json_schema: {cls.__name__} is neither a Pydantic model class nor a dataclass"
    hint = "; a generated class is for message_type=" if hasattr(cls, "DESCRIPTOR") else ""
    raise InvalidRequest(message + hint, field="json_schema")


def _of_pydantic(cls: type) -> ObjectType:
    # Pydantic is not a dependency; a model class has imported it.
    adapter: Any = sys.modules["pydantic"].TypeAdapter(cls)
    schema = adapter.json_schema()
    for each in (schema, *schema.get("$defs", {}).values()):
        if "properties" in each:
            # Fields that the class does not have would be dropped.
            each.setdefault("additionalProperties", False)
    return ObjectType(cls.__name__, json.dumps(schema), adapter.validate_json)
