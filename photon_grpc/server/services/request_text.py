"""A request as the JSON of a prompt, without the fields that no prompt may hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import Error, MessageToDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from photon_grpc.errors import InvalidRequest
from photon_grpc.server.typed.message_graph import ANY_FORM, ONE_VALUE, is_map, reached_from, value_type

_ANY = "google.protobuf.Any"
#: Messages whose JSON is not made of their fields.
_OWN_FORM = frozenset({_ANY, *ONE_VALUE, *ANY_FORM})


class RequestText:
    """The JSON of one method's requests.

    Args:
        request: their type.
        pool: finds the types within google.protobuf.Any.
        is_hidden: whether a field may not reach a prompt.
    """

    def __init__(self, request: Descriptor, pool: DescriptorPool, is_hidden: Callable[[FieldDescriptor], bool]) -> None:
        self._pool = pool
        self._is_hidden = is_hidden
        reached = list(reached_from(request))
        #: Whether requests must be searched for hidden fields.
        self._is_searched = any(
            message.full_name == _ANY or message.is_extendable or any(is_hidden(field) for field in message.fields)
            for message in reached
        )

    def write(self, request: Message) -> str:
        """Return the JSON of `request`, which loses its hidden fields. Raise InvalidRequest."""
        return json.dumps(self._plain(request), ensure_ascii=False)

    def write_as(self, message: Message, written: Any) -> str:
        """Return the JSON of `message` without spaces; defaults that `written`, which it was parsed from, has stay."""
        descriptor: Any = message.DESCRIPTOR
        plain = self._as_written(self._shown(message), written, descriptor)
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))

    def largest_field(self, request: Message) -> str:
        """Return the JSON name of the field that takes most characters; "" if there is none."""
        try:
            plain = self._plain(request)
        except InvalidRequest:
            return ""
        sizes = {name: len(json.dumps(value, ensure_ascii=False)) for name, value in plain.items()}
        return max(sizes, key=sizes.__getitem__, default="")

    def _plain(self, request: Message) -> dict[str, Any]:
        shown = self._shown(request)
        return shown if isinstance(shown, dict) else {"value": shown}

    def _shown(self, request: Message) -> Any:
        """Return the JSON of `request`, which loses its hidden fields. Raise InvalidRequest."""
        try:
            if self._is_searched:
                self._hide(request)
            return MessageToDict(request, descriptor_pool=self._pool)
        except (TypeError, ValueError, DecodeError, Error) as error:
            # Text of protobuf may quote the request.
            field = self._without_json(request)
            what = f"{field}: its value has" if field else "the request has"
            raise InvalidRequest(f"{what} no JSON: {type(error).__name__}", field=field) from None
        except RecursionError:
            raise InvalidRequest("the request is nested too deeply") from None

    def _without_json(self, message: Message) -> str:
        """Return the path of the first field that has no JSON, such as a time out of range; "" if none is found."""
        for field, value in message.ListFields():
            if value_type(field) is None:
                continue
            children = value.values() if is_map(field) else value if field.is_repeated else (value,)
            for at, child in enumerate(children):
                place = "[…]" if is_map(field) else f"[{at}]" if field.is_repeated else ""
                if child.DESCRIPTOR.full_name not in _OWN_FORM:
                    if within := self._without_json(child):
                        return f"{field.name}{place}.{within}"
                elif not self._has_json(child):
                    return f"{field.name}{place}"
        return ""

    def _has_json(self, message: Message) -> bool:
        try:
            MessageToDict(message, descriptor_pool=self._pool)
        except (TypeError, ValueError, DecodeError, Error):
            return False
        return True

    def _as_written(self, plain: Any, written: Any, message: Descriptor) -> Any:
        """Return the JSON in the order of `written`, with its defaults."""
        if message.full_name in _OWN_FORM:
            return plain
        fields = {name: field for field in message.fields for name in (field.name, field.json_name)}
        shown = {}
        for name, value in written.items():
            field = fields.get(name)
            if field is None or value is None or self._is_hidden(field):
                continue
            key = field.json_name
            shown[key] = self._value_as_written(plain[key], value, field) if key in plain else value
        return shown

    def _value_as_written(self, plain: Any, written: Any, field: FieldDescriptor) -> Any:
        child = value_type(field)
        if child is None:
            return plain
        if is_map(field):
            return {key: self._as_written(plain[key], value, child) for key, value in written.items() if key in plain}
        if field.is_repeated:
            return [self._as_written(*pair, child) for pair in zip(plain, written, strict=True)]
        return self._as_written(plain, written, child)

    def _hide(self, message: Message) -> None:
        if message.DESCRIPTOR.full_name == _ANY:
            self._hide_in_any(message)
            return
        for field, value in message.ListFields():
            if self._is_hidden(field):
                if field.is_extension:
                    message.ClearExtension(field)  # type: ignore[arg-type]  # its stub is too narrow
                else:
                    message.ClearField(field.name)
            elif is_map(field):
                if value_type(field) is not None:
                    for key in value:
                        self._hide(value[key])
            elif field.message_type is not None:
                for each in value if field.is_repeated else (value,):
                    self._hide(each)

    def _hide_in_any(self, message: Any) -> None:
        try:
            packed = GetMessageClass(self._pool.FindMessageTypeByName(message.TypeName())).FromString(message.value)
        except KeyError:
            name = message.TypeName()[:200]
            raise InvalidRequest(f"the request has a google.protobuf.Any of the type {name!r}, unknown here") from None
        self._hide(packed)
        message.value = packed.SerializeToString(deterministic=True)
