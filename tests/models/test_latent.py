"""Models with latent attention: names of checkpoints, pages, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.core.kv import PageFormat
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import TORCH
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE
from photon_grpc.models import build
from tests.models import reference

VARIANTS = ("deepseek2", "deepseek2-yarn-query-latent", "deepseek3")


@pytest.mark.parametrize("variant", VARIANTS)
def test_stacked_experts_load_as_each_on_its_own(variant: str, tmp_path: Path) -> None:
    model = reference.make_model(variant)
    alone, stacked = reference.save(model, tmp_path / "alone"), tmp_path / "stacked"
    model.save_pretrained(stacked, save_original_format=False)
    assert any("experts.gate_up_proj" in name for name in load_file(stacked / "model.safetensors"))
    ids = reference.prompts()[0]
    found = [
        reference.paged_logits(reference.load_decoder(path), [ids], block_size=16, chunks=[11])[0]
        for path in (alone, stacked)
    ]
    assert torch.equal(*found)


def test_a_token_keeps_one_latent(tmp_path: Path) -> None:
    decoder = reference.load_decoder(reference.save(reference.make_model("deepseek2"), tmp_path))
    assert {layer.attention.kv.format for layer in decoder.layers} == {PageFormat(1, 40, "float32", planes=1)}


@pytest.mark.parametrize("name", ["int8", "w8a8"])
def test_weights_of_8_bits_are_near(name: str, tmp_path: Path) -> None:
    model = reference.make_model("deepseek2")
    path, ids = reference.save(model, tmp_path), reference.prompts()[1]
    (found,) = reference.paged_logits(reference.load_decoder(path, quantization=name), [ids], block_size=16, chunks=[3])
    expected = reference.reference_logits(model, ids)
    assert 0 < (found - expected).norm() <= 0.3 * expected.norm()


def test_pages_of_8_bits_are_refused(tmp_path: Path) -> None:
    config = read_model_dir(reference.save(reference.make_model("deepseek2"), tmp_path))
    with pytest.raises(ModelLoadError, match="pages of 8 bits cannot hold latents"):
        build(config, dtype=torch.float32, device="cpu", kernels=TORCH, max_model_len=8, kv_dtype=PAGE_DTYPE)
