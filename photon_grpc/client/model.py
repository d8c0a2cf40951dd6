"""A model as its server describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from photon_grpc.client.enum_name import enum_name
from photon_grpc.v1 import model_pb2 as pb


@dataclass(frozen=True, slots=True)
class Model:
    """A served model.

    `state` and `features` are names of the proto's enums without their prefix, such as "READY" and "CHAT". Values that
    this client does not know are numbers, such as "9".
    """

    name: str
    aliases: tuple[str, ...]
    state: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    features: tuple[str, ...]
    #: Name of a limit -> the most that one request may have.
    limits: Mapping[str, int] = field(default_factory=dict)
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    #: Servers with the same weights and version give the same bits where docs/numerics.md promises it.
    numerics_version: str = ""
    #: What the version is made of, by the names of the proto.
    numerics: Mapping[str, Any] = field(default_factory=dict)
    #: Of quantized weights, by the names of the proto: bytes held and saved, tokens of KV cache gained.
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Of a model with experts, by the names of the proto: how many there are, and how steps have reached them.
    experts: Mapping[str, float] = field(default_factory=dict)


def read_model(message: pb.Model) -> Model:
    return Model(
        name=message.name,
        aliases=tuple(message.aliases),
        state=enum_name(pb.ModelState, message.state, "MODEL_STATE_"),
        max_context_tokens=message.max_context_tokens,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        features=tuple(enum_name(pb.Feature, number, "FEATURE_") for number in message.features),
        limits={limit.name: getattr(message.limits, limit.name) for limit in pb.Limits.DESCRIPTOR.fields},
        revision=message.revision,
        dtype=message.dtype,
        quantization=message.quantization,
        numerics_version=message.numerics_version,
        numerics=_numerics(message.numerics) if message.HasField("numerics") else {},
        weight_bytes=_numbers(message.weight_bytes) if message.HasField("weight_bytes") else {},
        experts=_numbers(message.experts) if message.HasField("experts") else {},
    )


def _numerics(message: pb.Numerics) -> dict[str, Any]:
    parts = {part.name: getattr(message, part.name) for part in pb.Numerics.DESCRIPTOR.fields}
    return parts | {"libraries": tuple(message.libraries)}


def _numbers(message: pb.WeightBytes | pb.Experts) -> dict[str, Any]:
    return {part.name: getattr(message, part.name) for part in message.DESCRIPTOR.fields}
