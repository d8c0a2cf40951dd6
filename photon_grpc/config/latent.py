"""Latent attention, from the keys of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from photon_grpc.config.experts import ExpertKeys
from photon_grpc.config.families import Family
from photon_grpc.config.json_file import refusal
from photon_grpc.config.rope import CONFIG_FILE

_Rank = Annotated[int, Meta(ge=1, le=2**14)]
_Size = Annotated[int, Meta(ge=1, le=1024)]


class LatentKeys(ExpertKeys, kw_only=True):
    """The keys of config.json that are about latent attention, with those about experts and rotary embedding."""

    kv_lora_rank: _Rank = 512
    q_lora_rank: _Rank | None = None
    qk_nope_head_dim: _Size = 128
    qk_rope_head_dim: _Size = 64
    v_head_dim: _Size = 128


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The sizes of latent attention.

    A token keeps `rank` numbers of keys and values of all heads, and `rotated` numbers of a key that is rotated. Heads
    of queries have `plain` and `rotated` numbers, those of values `value`. query_rank: of the latents of queries; 0:
    queries have none.
    """

    rank: int
    query_rank: int
    plain: int
    rotated: int
    value: int

    @property
    def width(self) -> int:
        """The numbers that a layer keeps of a token."""
        return self.rank + self.rotated

    @property
    def head(self) -> int:
        """The numbers of a query head."""
        return self.plain + self.rotated


def read_latent(config: LatentKeys, values: Mapping[str, Any], family: Family) -> LatentSpec | None:
    """Return the sizes of latent attention; None: the family has none. Raise ModelLoadError for those that are wrong.

    `values` are all keys of config.json, null included.
    """
    if not family.is_latent:
        return None
    if values.get("rope_interleave") is False:
        raise refusal(CONFIG_FILE, "rope_interleave", "is false; only interleaved pairs are supported")
    if config.qk_rope_head_dim % 2:
        raise refusal(CONFIG_FILE, "qk_rope_head_dim", f"must be even, is {config.qk_rope_head_dim}")
    query_rank = 0 if values.get("q_lora_rank") is None else config.q_lora_rank or 0
    sizes = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return LatentSpec(config.kv_lora_rank, query_rank, *sizes)
