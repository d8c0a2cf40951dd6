"""A fused decoder's own order of things, on the torch references of its kernels: the same logits as transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from photon_grpc.kernels.parts.tiles import Tile
from photon_grpc.layers import linear
from photon_grpc.models import Decoder
from photon_grpc.models.fused import FusedDecoder, LayerTiles, fold_norms, fuse
from tests.models.reference import load_decoder, make_model, paged_logits, prompts, reference_logits, save

#: On a CPU nobody asks what is in it.
TILES = LayerTiles(*[Tile("ring", 16, 32, 1, 2)] * 4)


@pytest.fixture
def row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as a GPU has them: not packed for this CPU."""
    monkeypatch.setattr(linear, "can_prepack", lambda weight: False)


@pytest.mark.usefixtures("row_major")
@pytest.mark.parametrize("variant", ["llama3-tied", "llama-untied-linear", "llama-biases", "qwen2"])
def test_decode_steps_and_prompts_equal_transformers(variant: str, tmp_path: Path) -> None:
    model = make_model(variant)
    decoder = load_decoder(save(model, tmp_path))
    fold_norms(decoder)
    fused = FusedDecoder(decoder, {8: TILES})
    # One token a row is a decode step; the chunks of five go through the ordinary path.
    for chunks in ([5, 1, 1], [1]):
        for ids, logits in zip(prompts(), paged_logits(fused, prompts(), block_size=8, chunks=chunks), strict=True):
            torch.testing.assert_close(logits, reference_logits(model, ids), rtol=2e-4, atol=2e-4)


def test_a_decoder_on_a_cpu_stays_as_it_is(tmp_path: Path) -> None:
    decoder = load_decoder(save(make_model("qwen2"), tmp_path))
    norms = [layer.input_norm.weight.clone() for layer in decoder.layers]
    assert fuse(decoder) is None
    assert type(decoder) is Decoder
    assert all(torch.equal(layer.input_norm.weight, norm) for layer, norm in zip(decoder.layers, norms, strict=True))
