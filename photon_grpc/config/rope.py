"""The parameters of rotary embedding, from either spelling in config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from photon_grpc.config.families import Family
from photon_grpc.config.json_file import as_struct, refusal, shown

CONFIG_FILE = "config.json"
#: Supported kinds, with the keys that each needs.
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "yarn": ("factor",),
}
#: A family with nothing of its own.
PLAIN = Family("")

Theta = Annotated[float, Meta(ge=1.0, le=1e12)]
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
#: One for each rotated pair of a head.
Factors = Annotated[tuple[Factor, ...], Meta(min_length=1, max_length=512)]
#: A factor of the logarithm of a factor.
Scale = Annotated[float, Meta(ge=0.0, le=100.0)]
#: A count of tokens.
Context = Annotated[int, Meta(ge=1, le=2**27)]


class RopeJson(Struct, kw_only=True):
    """`rope_parameters` (transformers 5) or `rope_scaling` (transformers 4) of config.json."""

    rope_theta: Theta | UnsetType = UNSET
    rope_type: str | UnsetType = UNSET
    type: str | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    short_factor: Factors | None = None
    long_factor: Factors | None = None
    attention_factor: Factor | None = None
    original_max_position_embeddings: Context | UnsetType = UNSET
    partial_rotary_factor: Share | UnsetType = UNSET
    #: Of yarn; None: 32 and 1.
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    mscale: Scale | None = None
    mscale_all_dim: Scale | None = None
    truncate: bool = True


class RopeKeys(Struct, kw_only=True):
    """The keys of config.json that rotary embedding depends on."""

    max_position_embeddings: Annotated[int, Meta(ge=2, le=2**27)]
    rope_theta: Theta = 10000.0
    #: Theta of the layers with a window, in families that have one for them.
    rope_local_base_freq: Theta = 10000.0
    partial_rotary_factor: Share = 1.0
    original_max_position_embeddings: Context | UnsetType = UNSET
    rope_parameters: RopeJson | None = None
    rope_scaling: RopeJson | None = None
    #: 0 for each layer without rotary embedding, else 1.
    no_rope_layers: list[Annotated[int, Meta(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 4


class RopesByType(Struct, kw_only=True):
    """`rope_parameters` of families with several kinds of layers."""

    full_attention: RopeJson | None = None
    sliding_attention: RopeJson | None = None


class TypedRopeKeys(Struct):
    rope_parameters: RopesByType


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of the rotary embedding, named as in config.json; `layers/rotary.py` has the formulas."""

    theta: float
    #: "default", "linear", "llama3", "longrope" or "yarn".
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    #: Of longrope; one for each rotated pair.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    #: Of cos and sin.
    attention_factor: float = 1.0
    #: The rotated share of each head, its first numbers.
    partial_rotary_factor: float = 1.0
    #: Of yarn: the rotations in the original context from which on a frequency stays, and up to which it is divided.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: Whether the pairs between the two are counted from whole ones on.
    truncate: bool = True
    #: Of the product of a query and a key, where the family scales it by yarn.
    score_factor: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated, as transformers rounds it."""
        return int(head_dim * self.partial_rotary_factor)

    def is_long(self, max_model_len: int) -> bool:
        """Return whether contexts of up to `max_model_len` tokens have longrope's long factors: then all have them."""
        return self.kind == "longrope" and max_model_len > self.original_max_position_embeddings


def read_rope(config: RopeKeys, family: Family = PLAIN) -> RopeSpec:
    """Read `rope_parameters`, else `rope_theta` and `rope_scaling`; `type` is a synonym of `rope_type`."""
    if config.rope_parameters is None:
        return _read(config.rope_scaling or RopeJson(), "rope_scaling", config.rope_theta, config, family)
    found = _read(config.rope_parameters, "rope_parameters", config.rope_theta, config, family)
    _refuse_another(found, config, family)
    return found


def _refuse_another(found: RopeSpec, config: RopeKeys, family: Family) -> None:
    """Raise ModelLoadError if `rope_scaling` says something else than `rope_parameters`, from which `found` is.

    transformers computes with `rope_scaling` then, but without the theta of `rope_parameters`.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling == RopeJson():
        return
    if _read(scaling, "rope_scaling", found.theta, config, family) != found:
        problem = "differs from rope_parameters: remove it, or put its parameters into rope_parameters"
        raise refusal(CONFIG_FILE, "rope_scaling", problem)


def read_local_ropes(config: RopeKeys, values: dict[str, Any], family: Family) -> tuple[RopeSpec, RopeSpec]:
    """Return the parameters of the layers without and with a window.

    They are in `rope_parameters` by the type of the layer, else `rope_theta` with `rope_scaling`, and
    `rope_local_base_freq`. `values` are those of config.json.
    """
    name = "rope_parameters"
    found = values.get(name)
    if not isinstance(found, dict):
        full = _read(config.rope_scaling or RopeJson(), "rope_scaling", config.rope_theta, config, family)
        return full, RopeSpec(config.rope_local_base_freq)
    for key in found.keys() - RopesByType.__struct_fields__:
        raise refusal(CONFIG_FILE, f"{name}.{key}", "is not the name of a type of layers")
    typed = as_struct({name: found}, TypedRopeKeys, CONFIG_FILE).rope_parameters
    thetas = {"full_attention": config.rope_theta, "sliding_attention": config.rope_local_base_freq}
    full, local = (
        _read(getattr(typed, kind) or RopeJson(), f"{name}.{kind}", theta, config, family)
        for kind, theta in thetas.items()
    )
    _refuse_another(full, config, family)
    return full, local


def read_rotated_layers(config: RopeKeys, num_layers: int, family: Family) -> tuple[bool, ...]:
    """Return which layers have rotary embedding: as `no_rope_layers` says, else all but every n-th."""
    if not family.may_skip_rotary:
        return (True,) * num_layers
    named = config.no_rope_layers
    if named is None:
        return tuple((layer + 1) % config.no_rope_layer_interval != 0 for layer in range(num_layers))
    if len(named) < num_layers:
        problem = f"must have a number for each of the {num_layers} layers, has {len(named)}"
        raise refusal(CONFIG_FILE, "no_rope_layers", problem)
    return tuple(map(bool, named[:num_layers]))


def _read(rope: RopeJson, name: str, theta: float, config: RopeKeys, family: Family) -> RopeSpec:
    key, named = ("rope_type", rope.rope_type) if rope.rope_type is not UNSET else ("type", rope.type or "default")
    kind = family.rope_synonyms.get(named, named)
    supported = [name for name in NEEDED if name != "yarn" or family.has_yarn]
    if kind not in supported:
        problem = f"is {shown(kind)}, which is not supported; supported: {', '.join(supported)}"
        raise refusal(CONFIG_FILE, f"{name}.{key}", problem)
    numbers: dict[str, Any] = {key: _required(rope, key, name) for key in NEEDED[kind]}
    theta = rope.rope_theta or theta
    spec: dict[str, Any] = {
        "theta": theta,
        "kind": kind,
        "partial_rotary_factor": _share(rope, name, config, family),
    } | numbers
    original = config.original_max_position_embeddings or rope.original_max_position_embeddings
    original = original or config.max_position_embeddings
    if kind == "llama3":
        _check_llama3(name, **numbers)
        spec["original_max_position_embeddings"] = original
    if kind == "longrope":
        spec["original_max_position_embeddings"] = original
        spec["attention_factor"] = rope.attention_factor or _attention_factor(
            rope.factor or config.max_position_embeddings / original, original
        )
    if kind == "yarn":
        spec |= _yarn(rope, original)
    return RopeSpec(**spec)


def _yarn(rope: RopeJson, original: int) -> dict[str, Any]:
    factor, all_dim = rope.factor or 1.0, rope.mscale_all_dim or 0.0
    inferred = _mscale(factor, rope.mscale) / _mscale(factor, all_dim) if rope.mscale and all_dim else _mscale(factor)
    return {
        "original_max_position_embeddings": original,
        "attention_factor": rope.attention_factor or inferred,
        "score_factor": _mscale(factor, all_dim) ** 2 if all_dim else 1.0,
        "beta_fast": rope.beta_fast or 32.0,
        "beta_slow": rope.beta_slow or 1.0,
        "truncate": rope.truncate,
    }


def _mscale(factor: float, scale: float = 1.0) -> float:
    """Return yarn's factor of numbers for a context that is `factor` times the original one."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _attention_factor(factor: float, original: int) -> float:
    """Return LongRoPE's factor of cos and sin for a context that is `factor` times the original one."""
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(max(2, original)))


def _check_llama3(name: str, factor: float, low_freq_factor: float, high_freq_factor: float) -> None:
    if high_freq_factor <= low_freq_factor:
        problem = f"must be above low_freq_factor {low_freq_factor:g}, is {high_freq_factor:g}"
        raise refusal(CONFIG_FILE, f"{name}.high_freq_factor", problem)


def _share(rope: RopeJson, name: str, config: RopeKeys, family: Family) -> float:
    """Return the rotated share of a head; refuse one below 1 where the family rotates whole heads."""
    shares = {"": config.partial_rotary_factor}
    if rope.partial_rotary_factor is not UNSET:
        shares[f"{name}."] = rope.partial_rotary_factor
    for place, share in shares.items():
        if share != 1.0 and not family.may_rotate_part:
            problem = f"is {share:g}, below 1; partial rotary embedding is not supported"
            raise refusal(CONFIG_FILE, place + "partial_rotary_factor", problem)
    return list(shares.values())[-1]


def check_rope(spec: RopeSpec, head_dim: int) -> None:
    """Raise ModelLoadError if `spec` does not suit heads of `head_dim`."""
    rotated = spec.rotated(head_dim)
    if rotated < 2 or rotated % 2:
        problem = f"{spec.partial_rotary_factor:g} of head_dim {head_dim} is {rotated}, which is not a number of pairs"
        raise refusal(CONFIG_FILE, "partial_rotary_factor", problem)
    for key in ("short_factor", "long_factor"):
        found = getattr(spec, key)
        if found and len(found) != rotated // 2:
            problem = f"must have {rotated // 2} numbers, one for each rotated pair of a head, has {len(found)}"
            raise refusal(CONFIG_FILE, key, problem)


def _required(rope: RopeJson, key: str, name: str) -> Any:
    value = getattr(rope, key)
    if value is None:
        raise refusal(CONFIG_FILE, f"{name}.{key}", "is missing")
    return value


def refuse_per_layer(values: dict[str, Any]) -> None:
    """Raise ModelLoadError if config.json has different rotary parameters for some layers."""
    name = "rope_scaling" if values.get("rope_parameters") is None else "rope_parameters"
    for key, value in (values.get(name) or {}).items():
        if isinstance(value, dict):
            raise refusal(CONFIG_FILE, f"{name}.{key}", "holds parameters for some layers only, which is not supported")
