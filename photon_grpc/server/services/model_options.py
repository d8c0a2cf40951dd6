"""The options of a method, `photon_grpc/v1/service.proto`: those of its service, replaced by its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message

from photon_grpc.config.service_files import FLAG
from photon_grpc.core.ask import SamplingAsk
from photon_grpc.core.fields import FIELDS
from photon_grpc.errors import ConfigError, ModelLoadError
from photon_grpc.frontend.input.chat import ChatTemplate
from photon_grpc.server.typed.json_grammar import ValueBounds
from photon_grpc.v1 import service_pb2

_MAX_DEFAULT_MESSAGES = 32
_DEFAULT_BOUNDS = ValueBounds(chars=512, entries=16)
#: Options that are those of a request, within the same bounds.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
)
#: Further options -> their least and greatest value.
_RANGES = {
    "max_tokens": (1, 2**20),
    "max_messages": (1, 1024),
    "max_characters": (16, 2**16),
    "max_entries": (1, 1024),
}


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Options as they hold for one method."""

    system: str = ""
    #: None: the user's turn is the request's JSON.
    template: ChatTemplate | None = None
    #: Pairs of a request's and its answer's JSON.
    examples: tuple[tuple[str, str], ...] = ()
    sampling: SamplingAsk = field(default_factory=SamplingAsk)
    max_tokens: int | None = None
    max_messages: int = _MAX_DEFAULT_MESSAGES
    bounds: ValueBounds = _DEFAULT_BOUNDS
    #: Stands before all else.
    cache_prefix: str = ""

    def user_turn(self, request: str) -> str:
        """Return the user's turn of a request's JSON. Raise InvalidTemplate, PromptTooLong."""
        if self.template is None:
            return request
        return self.template.render({"request": json.loads(request), "json": request})


def options_by_method(files: Mapping[str, FileDescriptorProto]) -> dict[str, service_pb2.ModelOptions]:
    """Return the options of every method by its full name."""
    found = {}
    for file in files.values():
        scope = f"{file.package}." if file.package else ""
        for service in file.service:
            for method in service.method:
                merged = service_pb2.ModelOptions()
                merged.CopyFrom(service.options.Extensions[service_pb2.service_model])
                own = method.options.Extensions[service_pb2.model]
                if own.examples:
                    del merged.examples[:]
                merged.MergeFrom(own)
                found[f"{scope}{service.name}.{method.name}"] = merged
    return found


def read_options(method: str, options: service_pb2.ModelOptions) -> MethodOptions:
    """Return the options of `method`, with its examples as the operator wrote them. Raise ConfigError."""
    for name, (least, most) in _RANGES.items():
        value = getattr(options, name)
        if options.HasField(name) and not least <= value <= most:  # type: ignore[arg-type]  # its stub lists names
            raise _bad_option(method, f"{name} is {value:g}; it must be from {least:g} to {most:g}")
    sampling = _given(options, *_SAMPLING)
    for name, value in sampling.items():
        bounds = FIELDS[name].bounds
        if bounds is not None and not bounds.holds(value, float(bounds.most)):
            raise _bad_option(method, f"{name} is {value:g}; it must {bounds.rule(float(bounds.most))}")
    return MethodOptions(
        system=options.system,
        template=_template(method, options.template),
        examples=tuple([(each.request_json, each.response_json) for each in options.examples]),
        sampling=SamplingAsk(**sampling),
        max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
        max_messages=options.max_messages or _MAX_DEFAULT_MESSAGES,
        bounds=ValueBounds(
            options.max_characters or _DEFAULT_BOUNDS.chars, options.max_entries or _DEFAULT_BOUNDS.entries
        ),
        cache_prefix=options.cache_prefix,
    )


def _given(options: Message, *names: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if options.HasField(name)}


def _template(method: str, source: str) -> ChatTemplate | None:
    try:
        return ChatTemplate(source) if source else None
    except ModelLoadError as error:
        raise _bad_option(method, f"template: {error}") from None


def _bad_option(method: str, problem: str) -> ConfigError:
    return ConfigError(f"{FLAG} {method}: option {problem}", field=FLAG)
