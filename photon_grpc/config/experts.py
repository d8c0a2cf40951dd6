"""The experts of a model's sparse layers, from the keys of config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from photon_grpc.config.families import ExpertKind
from photon_grpc.config.json_file import refusal, shown
from photon_grpc.config.rope import CONFIG_FILE, RopeKeys

MAX_EXPERTS, MAX_TOP_K = 1024, 32

_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(\w+\.experts\.)?")
_Number = Annotated[int, Meta(ge=0, le=2**20)]


class ExpertKeys(RopeKeys, kw_only=True):
    """The keys of config.json that are about experts, with those about rotary embedding."""

    num_experts: Annotated[int, Meta(ge=0, le=MAX_EXPERTS)] | UnsetType = UNSET
    #: Mixtral's name of num_experts.
    num_local_experts: Annotated[int, Meta(ge=0, le=MAX_EXPERTS)] | UnsetType = UNSET
    num_experts_per_tok: _Number | None = None
    moe_intermediate_size: _Number | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: _Number = 1
    mlp_only_layers: list[_Number] | None = None
    scoring_func: str | None = None
    #: DeepSeek's name of num_experts.
    n_routed_experts: Annotated[int, Meta(ge=0, le=MAX_EXPERTS)] | UnsetType = UNSET
    n_shared_experts: Annotated[int, Meta(ge=0, le=64)] = 0
    first_k_dense_replace: _Number = 0
    moe_layer_freq: Annotated[int, Meta(ge=1, le=1024)] = 1
    routed_scaling_factor: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    topk_method: str | UnsetType = UNSET
    n_group: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] | None = None
    topk_group: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] | None = None


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The experts of a model: each sparse layer has `num_experts`, of which a token takes `top_k`.

    intermediate_size: that of one expert. scoring: of a router's numbers. renormalises: whether a token's weights add
    up to one. layers: whether each layer of the model has experts. scale: of a token's weights.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid"]
    renormalises: bool
    layers: tuple[bool, ...]
    #: The intermediate size of what every token reaches beside its experts; 0: there is nothing.
    shared_size: int = 0
    scale: float = 1.0
    #: Whether experts are chosen by their numbers and a bias.
    has_bias: bool = False
    #: Groups of experts, and those that a token chooses from; 0: there are none.
    groups: int = 0
    groups_taken: int = 0

    @property
    def num_shared(self) -> int:
        """The experts of `intermediate_size` that every token reaches."""
        return self.shared_size // self.intermediate_size

    def reached(self, num_tokens: int) -> float:
        """Return the experts of a layer that so many tokens are expected to reach, if all are equally likely."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens)


def read_experts(config: ExpertKeys, values: Mapping[str, Any], kind: ExpertKind | None, num_layers: int
) -> ExpertSpec | None:  # fmt: skip
    """Return the experts; None if no layer has any. Raise ModelLoadError for what is not computed.

    `values` are all keys of config.json, of which `config` has those that are known.
    """
    if kind is None:
        return None
    _refuse_capacities(values)
    num_experts = _num_experts(config, kind)
    layers = _sparse_layers(config, kind, num_layers)
    if not num_experts or not any(layers):
        return None
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if kind.has_bias else "softmax"
    if config.scoring_func not in (None, scoring):
        problem = f"is {shown(config.scoring_func)}; only {scoring} is supported for this architecture"
        raise refusal(CONFIG_FILE, "scoring_func", problem)
    size, top_k = _size(values, kind), _top_k(config, num_experts)
    if kind.is_deepseek:
        _refuse_other_methods(config, kind)
    groups, groups_taken = _groups(config, num_experts, top_k) if kind.has_bias else (0, 0)
    return ExpertSpec(
        num_experts, top_k, size, scoring, config.norm_topk_prob if kind.renormalises is None else kind.renormalises,
        layers, config.n_shared_experts * size if kind.is_deepseek else 0,
        config.routed_scaling_factor if kind.is_deepseek else 1.0, kind.has_bias, groups, groups_taken,
    )  # fmt: skip


def refuse_other_layers(experts: ExpertSpec, architecture: str, names: Iterable[str]) -> None:
    """Raise ModelLoadError if layers with tensors of these names have other experts than config.json says."""
    found = [match for name in names if (match := _LAYER_TENSOR.match(name))]
    present, stored = ({int(match[1]) for match in found if match[group]} for group in (1, 2))
    of_family = {"Deepseek": "first_k_dense_replace, moe_layer_freq", "Mixtral": "architectures"}
    keys = next((of_family[name] for name in of_family if name in architecture), "decoder_sparse_step, mlp_only_layers")
    for layer, is_sparse in enumerate(experts.layers if stored else ()):
        if layer in present and is_sparse != (layer in stored):
            said, seen = ("experts", "has none") if is_sparse else ("no experts", "has some")
            raise refusal(CONFIG_FILE, keys, f"give layer {layer} {said}, but the checkpoint {seen} there")


def _groups(config: ExpertKeys, num_experts: int, top_k: int) -> tuple[int, int]:
    """Return the groups of experts and those that are taken. Raise ModelLoadError for those that do not divide."""
    groups, taken = config.n_group or 1, config.topk_group or 1
    if num_experts % groups or num_experts // groups < 2:
        problem = f"is {groups}; {num_experts} experts are not that many groups of at least two"
        raise refusal(CONFIG_FILE, "n_group", problem)
    if taken > groups or taken * (num_experts // groups) < top_k:
        problem = f"are {taken} and {top_k}; of {groups} groups each has {num_experts // groups} experts"
        raise refusal(CONFIG_FILE, "topk_group, num_experts_per_tok", problem)
    return (groups, taken) if taken < groups else (0, 0)


def _refuse_capacities(values: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a bound on an expert's tokens: here no token is dropped, whatever its company."""
    for key, value in values.items():
        if "capacity" in key and value is not None:
            raise refusal(CONFIG_FILE, key, f"is {shown(value)}; a capacity of experts is not supported")


def _refuse_other_methods(config: ExpertKeys, kind: ExpertKind) -> None:
    method = "noaux_tc" if kind.has_bias else "greedy"
    if config.topk_method not in (UNSET, method):
        problem = f"is {shown(config.topk_method)}; only {method} is supported for this architecture"
        raise refusal(CONFIG_FILE, "topk_method", problem)
    if config.norm_topk_prob and not kind.has_bias:
        raise refusal(CONFIG_FILE, "norm_topk_prob", "is true, which is not supported for this architecture")


def _num_experts(config: ExpertKeys, kind: ExpertKind) -> int:
    keys = ("n_routed_experts",) if kind.is_deepseek else ("num_experts", "num_local_experts")
    counts = {getattr(config, key) for key in keys} - {UNSET}
    if len(counts) > 1:
        problem = f"is {config.num_local_experts}, but num_experts is {config.num_experts}"
        raise refusal(CONFIG_FILE, "num_local_experts", problem)
    return (counts.pop() or 0) if counts else kind.number


def _top_k(config: ExpertKeys, num_experts: int) -> int:
    top_k, most = config.num_experts_per_tok, min(num_experts, MAX_TOP_K)
    if top_k is None:
        raise refusal(CONFIG_FILE, "num_experts_per_tok", "is missing")
    if not 1 <= top_k <= most:
        problem = f"must be between 1 and {most} where there are {num_experts} experts, is {top_k}"
        raise refusal(CONFIG_FILE, "num_experts_per_tok", problem)
    return top_k


def _size(values: Mapping[str, Any], kind: ExpertKind) -> int:
    size = values.get(kind.size)
    if not isinstance(size, int) or size < 1:
        raise refusal(CONFIG_FILE, kind.size, f"must be at least 1, is {shown(size)}")
    return size


def _sparse_layers(config: ExpertKeys, kind: ExpertKind, num_layers: int) -> tuple[bool, ...]:
    if kind.is_deepseek:
        begin, step = config.first_k_dense_replace, config.moe_layer_freq
        return tuple(layer >= begin and layer % step == 0 for layer in range(num_layers))
    if not kind.may_mix:
        return (True,) * num_layers
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    if not step:
        raise refusal(CONFIG_FILE, "decoder_sparse_step", "must be at least 1, is 0")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))
