"""The keys of config.json that a family does not read; there null means no more than a missing key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from photon_grpc.config.experts import ExpertKeys
from photon_grpc.config.families import Family
from photon_grpc.config.latent import LatentKeys
from photon_grpc.config.rope import RopeKeys

_OF_LATENTS = set(LatentKeys.__struct_fields__) - set(ExpertKeys.__struct_fields__)
_OF_EXPERTS = set(ExpertKeys.__struct_fields__) - set(RopeKeys.__struct_fields__)
_OF_DEEPSEEK = {
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "routed_scaling_factor"),
    *("topk_method", "n_group", "topk_group"),
}
_OF_OTHER_EXPERTS = {"num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"}


def without_unread_nulls(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the keys of config.json without those that are null and that the family does not read."""
    unread = _unread(family)
    return {key: value for key, value in values.items() if value is not None or key not in unread}


def _unread(family: Family) -> set[str]:
    experts = family.experts
    is_read = [
        (_OF_LATENTS, family.is_latent),
        (_OF_EXPERTS, experts is not None),
        (_OF_DEEPSEEK, experts is not None and experts.is_deepseek),
        (_OF_OTHER_EXPERTS, experts is not None and not experts.is_deepseek),
        ({"partial_rotary_factor"}, family.may_rotate_part),
        ({"rope_local_base_freq"}, family.has_local_rotary),
        ({"no_rope_layer_interval"}, family.may_skip_rotary),
        ({"query_pre_attn_scalar"}, family.has_query_scale),
        ({"use_sliding_window"}, family.slides in ("from_layer", "without_rotary") or family.experts is not None),
        ({"max_window_layers"}, family.slides == "from_layer"),
        ({"sliding_window_pattern"}, family.slides == "pattern"),
        ({"attention_bias"}, family.qkv_bias is None or family.output_bias is None),
        ({"mlp_bias"}, family.mlp_bias is None),
    ]
    return {key for keys, read in is_read if not read for key in keys}
