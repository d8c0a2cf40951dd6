"""The parameters of rotary embedding, from either spelling in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from photon_grpc.config.json_file import refusal, shown

CONFIG_FILE = "config.json"
#: Supported kinds, with the keys that each needs.
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

Theta = Annotated[float, Meta(ge=1.0, le=1e12)]
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
#: A count of tokens.
Context = Annotated[int, Meta(ge=1, le=2**27)]


class RopeJson(Struct, kw_only=True):
    """`rope_parameters` (transformers 5) or `rope_scaling` (transformers 4) of config.json."""

    rope_theta: Theta | None = None
    rope_type: str | None = None
    type: str = "default"
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Context | None = None
    partial_rotary_factor: Share = 1.0


class RopeKeys(Struct, kw_only=True):
    """The keys of config.json that rotary embedding depends on."""

    max_position_embeddings: Annotated[int, Meta(ge=2, le=2**27)]
    rope_theta: Theta = 10000.0
    partial_rotary_factor: Share = 1.0
    original_max_position_embeddings: Context | None = None
    rope_parameters: RopeJson | None = None
    rope_scaling: RopeJson | None = None


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of the rotary embedding, named as in config.json; `layers/rotary.py` has the formulas."""

    theta: float
    #: "default", "linear" or "llama3".
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


def read_rope(config: RopeKeys) -> RopeSpec:
    """Read `rope_parameters`, else `rope_theta` and `rope_scaling`; `type` is a synonym of `rope_type`."""
    name = "rope_scaling" if config.rope_parameters is None else "rope_parameters"
    rope = getattr(config, name) or RopeJson()
    for place, share in (("", config.partial_rotary_factor), (f"{name}.", rope.partial_rotary_factor)):
        if share != 1.0:
            problem = f"is {share:g}, below 1; partial rotary embedding is not supported"
            raise refusal(CONFIG_FILE, place + "partial_rotary_factor", problem)
    theta = config.rope_theta if rope.rope_theta is None else rope.rope_theta
    key = "type" if rope.rope_type is None else "rope_type"
    kind = getattr(rope, key)
    if kind not in NEEDED:
        problem = f"is {shown(kind)}, which is not supported; supported: {', '.join(NEEDED)}"
        raise refusal(CONFIG_FILE, f"{name}.{key}", problem)
    numbers: dict[str, Any] = {key: _required(rope, key, name) for key in NEEDED[kind]}
    if kind != "llama3":
        return RopeSpec(theta, kind, **numbers)
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    if high <= low:
        raise refusal(CONFIG_FILE, f"{name}.high_freq_factor", f"must be above low_freq_factor {low:g}, is {high:g}")
    original = config.original_max_position_embeddings or rope.original_max_position_embeddings
    return RopeSpec(theta, kind, **numbers, original_max_position_embeddings=original or config.max_position_embeddings)


def _required(rope: RopeJson, key: str, name: str) -> float:
    value: float | None = getattr(rope, key)
    if value is None:
        raise refusal(CONFIG_FILE, f"{name}.{key}", "is missing")
    return value


def refuse_per_layer(values: dict[str, Any]) -> None:
    """Raise ModelLoadError if config.json has different rotary parameters for some layers."""
    name = "rope_scaling" if values.get("rope_parameters") is None else "rope_parameters"
    for key, value in (values.get(name) or {}).items():
        if isinstance(value, dict):
            raise refusal(CONFIG_FILE, f"{name}.{key}", "holds parameters for some layers only, which is not supported")
