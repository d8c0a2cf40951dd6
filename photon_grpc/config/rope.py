"""The spacing of a model's rotary angles, from either spelling of config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from photon_grpc.config.json_fields import JsonFields, shown

KINDS = ("default", "linear", "llama3")

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of the rotary embedding; the names are those of config.json. The formulas are in
    `layers/rotary.py`."""

    theta: float
    #: "default", "linear" or "llama3".
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


def read_rope(config: JsonFields, max_position_embeddings: int) -> RopeSpec:
    """From `rope_parameters` (transformers 5), else `rope_theta` and `rope_scaling` (transformers 4); `type` is
    `rope_type`."""
    parameters, scaling = config.object("rope_parameters"), config.object("rope_scaling")
    for fields in (config, parameters, scaling):
        _check_types(fields)
    rope = parameters if config.has("rope_parameters") else scaling
    for key, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.error(key, "holds parameters for some layers only, which is not supported")
    _refuse_partial(config)
    _refuse_partial(rope)
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", 1.0, 1e12, 10000.0)
    key = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.text(key, "default")
    if kind not in KINDS:
        raise rope.error(key, f"is {shown(kind)}, which is not supported; known are {', '.join(KINDS)}")
    if kind == "default":
        return RopeSpec(theta)
    factor = rope.number("factor", 1e-6, 1e6)
    return (
        RopeSpec(theta, kind, factor)
        if kind == "linear"
        else _llama3(config, rope, theta, factor, max_position_embeddings)
    )


def _llama3(
    config: JsonFields, rope: JsonFields, theta: float, factor: float, max_position_embeddings: int
) -> RopeSpec:
    low = rope.number("low_freq_factor", 1e-6, 1e6)
    high = rope.number("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        raise rope.error("high_freq_factor", f"must be above low_freq_factor {low:g}, is {high:g}")
    source = config if config.has(_ORIGINAL) else rope
    return RopeSpec(theta, "llama3", factor, low, high, source.integer(_ORIGINAL, 1, 2**27, max_position_embeddings))


def _check_types(fields: JsonFields) -> None:
    """Of every key that some spelling or kind reads, whether or not this one does."""
    for key in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"):
        fields.optional_number(key, -math.inf, math.inf)
    for key in ("rope_type", "type"):
        fields.text(key, "")
    if fields.has(_ORIGINAL):
        fields.integer(_ORIGINAL, 1, 2**27)


def _refuse_partial(fields: JsonFields) -> None:
    if fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "is below 1; partial rotary embedding is not supported")
