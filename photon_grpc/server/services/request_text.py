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
from photon_grpc.server.typed.message_graph import is_map, reached_from, value_type

_ANY = "google.protobuf.Any"


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

    def largest_field(self, request: Message) -> str:
        """Return the JSON name of the field that takes most characters; "" if there is none."""
        try:
            plain = self._plain(request)
        except InvalidRequest:
            return ""
        sizes = {name: len(json.dumps(value, ensure_ascii=False)) for name, value in plain.items()}
        return max(sizes, key=sizes.__getitem__, default="")

    def _plain(self, request: Message) -> dict[str, Any]:
        try:
            if self._is_searched:
                self._hide(request)
            plain = MessageToDict(request, descriptor_pool=self._pool)
        except (TypeError, ValueError, DecodeError, Error) as error:
            # Text of protobuf, which may quote the request.
            raise InvalidRequest(f"the request has no JSON: {type(error).__name__}") from None
        except RecursionError:
            raise InvalidRequest("the request is nested too deeply") from None
        return plain if isinstance(plain, dict) else {"value": plain}

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
