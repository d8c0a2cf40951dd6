"""Odd members of the families with experts: all experts taken, or one, dense layers between, several shared ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import reference

#: name -> variant of `reference`, and what differs from it.
MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-of-seven": ("qwen3moe", {"num_experts": 7, "num_experts_per_tok": 7}),
    "one-of-five-every-second-layer": (
        "qwen3moe",
        {"num_experts": 5, "num_experts_per_tok": 1, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "dense-at-the-ends": (
        "qwen3moe",
        {"num_experts": 9, "num_experts_per_tok": 4, "mlp_only_layers": [0, 3], "num_hidden_layers": 4}
        | {"norm_topk_prob": False},
    ),
    "mixtral-all-of-three": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "three-shared": (
        "deepseek2",
        {"n_routed_experts": 5, "n_shared_experts": 3, "num_experts_per_tok": 5, "first_k_dense_replace": 2},
    ),
    "odd-latents": (
        "deepseek2",
        {"kv_lora_rank": 20, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14, "q_lora_rank": 12},
    ),
    "one-of-four-groups": (
        "deepseek3",
        {"n_routed_experts": 12, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 2},
    ),
    "one-group-none-shared": (
        "deepseek3",
        {"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "n_shared_experts": 0},
    ),
}
USUAL = {"one-of-five-every-second-layer", "three-shared", "one-of-four-groups", "one-group-none-shared"}


@pytest.mark.parametrize(
    "name", [each if each in USUAL else pytest.param(each, marks=pytest.mark.full) for each in MEMBERS]
)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    variant, differing = MEMBERS[name]
    model = reference.make_model(variant, **differing)
    decoder = reference.load_decoder(reference.save(model, tmp_path))
    for length in (1, 7, 33):
        ids = [(37 * place + 11 * length) % 131 for place in range(length)]
        expected = reference.reference_logits(model, ids)
        for chunk in (length, max(1, length // 3)):
            (found,) = reference.paged_logits(decoder, [ids], block_size=16, chunks=[chunk])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
