"""A fused decoder's own order of things, on the torch references of its kernels: the same logits as transformers, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from photon_grpc.kernels.linear import head
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.layers import embedding, linear
from photon_grpc.models import Decoder
from photon_grpc.models.fused import FusedDecoder, LayerTiles, fold_norms, fuse
from tests.models.reference import load_decoder, make_model, paged_logits, prompts, reference_logits, save

#: On a CPU nobody asks what is in it.
TILES = LayerTiles(*[Tile("gemv", 16, 32, 1, 2)] * 4)
LAYER_TILES = {"library": {}, "tiles": {8: TILES}, "both": {8: TILES._replace(qkv=None, down=None)}}


@pytest.fixture
def row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as a GPU has them: not packed for this CPU."""
    for module in (linear, embedding):
        monkeypatch.setattr(module, "can_prepack", lambda weight: False)


@pytest.mark.usefixtures("row_major")
@pytest.mark.parametrize("head_tiles", [{}, {8: TILES.qkv}], ids=["library's head", "fused head"])
@pytest.mark.parametrize("layer_tiles", LAYER_TILES.values(), ids=LAYER_TILES)
@pytest.mark.parametrize("variant", ["llama3-tied", "llama-untied-linear", "llama-biases", "qwen2", "qwen3"])
def test_decode_steps_and_prompts_equal_transformers(
    variant: str, layer_tiles: dict[int, LayerTiles], head_tiles: dict[int, Tile], tmp_path: Path
) -> None:
    if variant == "qwen3":
        layer_tiles = {rows: tiles._replace(qkv=None) for rows, tiles in layer_tiles.items()}
    model = make_model(variant)
    decoder = load_decoder(save(model, tmp_path))
    fold_norms(decoder)
    fused = FusedDecoder(decoder, layer_tiles, head_tiles)
    # One token a row is a decode step; chunks of five of every row are more tokens than the bucket.
    for chunks in ([5, 1, 1], [1]):
        for ids, logits in zip(prompts(), paged_logits(fused, prompts(), block_size=8, chunks=chunks), strict=True):
            torch.testing.assert_close(logits, reference_logits(model, ids), rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("row_major")
def test_a_head_is_multiplied_by_the_tile_of_its_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tile] = []
    monkeypatch.setattr(head, "logits_launch", lambda hidden, weight, tile: taken.append(tile))
    monkeypatch.setattr(head, "draw_launch", lambda hidden, weight, chances, tile: taken.append(tile))
    decoder = load_decoder(save(make_model("qwen2"), tmp_path))
    decoder.kernels = replace(decoder.kernels, draw=lambda logits, chances: torch.zeros(len(logits)))
    # Of 33 to 64 rows and of none the library has it.
    tiles = {rows: Tile("gemv", rows, 32, 1, 2) for rows in (8, 16, 32, 128)}
    fused = FusedDecoder(decoder, {}, tiles)
    for num_rows, bucket in {0: 0, 1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 33: 0, 64: 0, 65: 128, 128: 128, 129: 0}.items():
        taken.clear()
        hidden = torch.zeros(num_rows, decoder.norm.weight.shape[0])
        fused.logits(hidden)
        fused.draw(hidden, None)  # type: ignore[arg-type]
        assert taken == ([tiles[bucket]] * 2 if bucket else [])


def test_a_decoder_on_a_cpu_stays_as_it_is(tmp_path: Path) -> None:
    decoder = load_decoder(save(make_model("qwen2"), tmp_path))
    norms = [layer.input_norm.weight.clone() for layer in decoder.layers]
    assert fuse(decoder) is None
    assert type(decoder) is Decoder
    assert all(torch.equal(layer.input_norm.weight, norm) for layer, norm in zip(decoder.layers, norms, strict=True))
