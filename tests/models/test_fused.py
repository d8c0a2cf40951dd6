"""Fused layers on the torch references of their kernels, in float32: transformers' logits; other layers stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from photon_grpc.core.kv import LayerKV, PageFormat
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE
from photon_grpc.kernels.linear import head
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.layers import unquantized
from photon_grpc.layers.epilogues import Epilogue, Gemm
from photon_grpc.layers.form import LayerForm
from photon_grpc.layers.linear import Folded, Linear
from photon_grpc.layers.parallel.experts import ParallelSparseMLP
from photon_grpc.layers.unquantized import Unquantized
from photon_grpc.models import Decoder
from photon_grpc.models.chains import CHAINS
from photon_grpc.models.decoder import DecoderLayer
from photon_grpc.models.fused import FusedDecoderLayer, fuse, num_fused, with_chains
from photon_grpc.models.kv_scales import KVScales, set_kv_scales
from tests.models.reference import load_decoder, make_model, paged_logits, prompts, reference_logits, save
from tests.runner import eight_bits

#: How `prompts` are cut, row by row and step by step: after most of the longest, five tokens beside one of the others,
#: which are more than the bucket, and one token a row, which is a decode step.
MIXED = [5, 1, 50, *[5, 1, 1] * 20]
DECODED = [30, 1, 58, *[1, 1, 1] * 12]
#: A CPU does not look into it.
TILE = Tile("gemv", 16, 32, 1, 2)
ALL = ("q_proj", "qkv_proj", "o_proj", "gate_proj", "gate_up_proj", "down_proj")
FUSED_VARIANTS = ["llama3-tied", "llama-untied-linear", "llama-biases", "qwen2", "qwen3", "mistral", "phi3", "gemma3"]
FUSED_VARIANTS += ["qwen3moe-between", "mixtral", "phi3-window-partial-longrope-tied", "deepseek2"]


#: Whose steps are computed by the library alone in `make test`: norms of heads, norms of results, experts, latents.
BY_LIBRARY = ("qwen3", "gemma3", "mixtral", "deepseek2")


def _unless_short(variant: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if variant in BY_LIBRARY else (pytest.mark.full,)


class Tiled(Unquantized):
    """Kernels of ours where a Linear's first output is among `names`, in steps of up to 8 rows; else the library."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def tile(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Tile | None:
        return TILE if num_rows == 8 and next(iter(linear.outputs)) in self.names else None


@pytest.fixture
def row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights as a GPU has them: not packed for this CPU."""
    monkeypatch.setattr(unquantized, "pack", lambda weight, bias: None)


def loaded(path: Path, method: Unquantized, kv_dtype: torch.dtype | None = None) -> Decoder:
    decoder = load_decoder(path, kv_dtype=kv_dtype)
    for leaf in decoder.leaves():
        if isinstance(leaf, Linear):
            leaf.method = method
    return decoder


def assert_equals(decoder: Decoder, model: Any) -> None:
    for chunks in (MIXED, DECODED):
        for ids, logits in zip(prompts(), paged_logits(decoder, prompts(), block_size=8, chunks=chunks), strict=True):
            torch.testing.assert_close(logits, reference_logits(model, ids), rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("row_major")
@pytest.mark.parametrize(
    ("variant", "names"),
    [
        # Prompts take the library with tiles, too.
        *(pytest.param(each, (*ALL, "lm_head"), id=f"{each}-tiles") for each in FUSED_VARIANTS),
        *(pytest.param(each, (), id=f"{each}-library", marks=_unless_short(each)) for each in FUSED_VARIANTS),
        *(
            pytest.param(each, ("o_proj", "gate_proj"), id=f"{each}-both", marks=pytest.mark.full)
            for each in FUSED_VARIANTS
        ),
    ],
)
def test_decode_steps_and_prompts_equal_transformers(variant: str, names: tuple[str, ...], tmp_path: Path) -> None:
    model = make_model(variant)
    fused = with_chains(loaded(save(model, tmp_path), Tiled(*names)))
    assert fused is not None
    assert all(isinstance(layer, FusedDecoderLayer) for layer in fused.layers)
    assert_equals(fused, model)


@pytest.mark.each_value
@pytest.mark.usefixtures("row_major")
@pytest.mark.parametrize("names", [(), ALL], ids=["library", "tiles"])
@pytest.mark.parametrize("variant", ["qwen2-window", "qwen3-window", "qwen3-window-between", "gemma3-untied"])
def test_layers_with_a_window_are_fused_with_those_without(
    variant: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    model = make_model(variant)
    mixed = with_chains(loaded(save(model, tmp_path), Tiled(*names)))
    assert mixed is not None
    assert {bool(layer.attention.kv.window) for layer in mixed.layers} == {True, False}
    assert all(isinstance(layer, FusedDecoderLayer) for layer in mixed.layers)
    assert len({id(layer.chain) for layer in mixed.layers}) == 1
    assert_equals(mixed, model)


@pytest.mark.each_value
@pytest.mark.usefixtures("row_major")
@pytest.mark.parametrize("names", [(), ALL], ids=["library", "tiles"])
@pytest.mark.parametrize("variant", ["llama3-tied", "qwen3", "qwen2-window", "gemma3"])
def test_pages_of_8_bits_are_written_by_fused_layers_too(variant: str, names: tuple[str, ...], tmp_path: Path) -> None:
    model = make_model(variant)
    unfused = loaded(save(model, tmp_path), Tiled(*names), PAGE_DTYPE)
    scales = torch.rand(len(unfused.layers), 2, 2, generator=torch.Generator().manual_seed(3)) * 0.2 + 0.1
    offsets = torch.randn(len(unfused.layers), 2, unfused.kv_groups[0].sections[0].format.width)
    set_kv_scales(unfused, KVScales(scales, "here", offsets))
    fused = with_chains(unfused)
    assert fused is not None and num_fused(fused) == len(fused.layers)
    for chunks in (MIXED, DECODED):
        found = paged_logits(fused, prompts(), block_size=8, chunks=chunks)
        for ids, logits in zip(prompts(), found, strict=True):
            difference = (logits - eight_bits.logits_of(model, ids, scales, offsets)).abs()
            # A key that is near the middle of two numbers may round to the other one.
            assert difference.median() < 1e-4 and difference.max() < 0.2


@pytest.mark.usefixtures("row_major")
def test_layers_of_several_groups_share_one_chain(tmp_path: Path) -> None:
    mixed = with_chains(loaded(save(make_model("qwen3-window-between"), tmp_path), Tiled(*ALL)))
    assert mixed is not None
    assert [group.window for group in mixed.kv_groups] == [0, 0, 21]
    first, second, last = mixed.layers
    assert first.chain is second.chain is last.chain is not None
    assert len({layer.attention.place for layer in mixed.layers}) == 3


@pytest.mark.usefixtures("row_major")
def test_every_chain_is_compared(tmp_path: Path) -> None:
    paths = {name: save(make_model(name), tmp_path / name) for name in FUSED_VARIANTS}
    # Experts of several ranks are compared where there are ranks.
    chains = {form for form in CHAINS if form.ffn is not ParallelSparseMLP}
    assert {layer.form for path in paths.values() for layer in load_decoder(path).layers} == chains


class PostNormLayer(DecoderLayer):
    """Another formula of the same parts: attention's result is normalised before it is added, as Gemma does."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Any) -> tuple[torch.Tensor, torch.Tensor]:
        stream = x if residual is None else x + residual
        attended = self.attention(self.input_norm(stream), ctx)
        x, residual = self.post_attention_norm.add(self.input_norm(attended), stream)
        return self.mlp(x, ctx), residual


def with_another_layer(decoder: Decoder, number: int) -> Decoder:
    layers = list(decoder.layers)
    old = layers[number]
    layers[number] = PostNormLayer(old.input_norm, old.attention, old.post_attention_norm, old.mlp)
    decoder.layers = tuple(layers)
    return decoder


@pytest.mark.each_value
@pytest.mark.usefixtures("row_major")
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("names", [(), ALL], ids=["library", "tiles"])
def test_each_layer_of_a_mixed_model_takes_its_own_path(number: int, names: tuple[str, ...], tmp_path: Path) -> None:
    path = save(make_model("llama-biases"), tmp_path)
    plain = with_another_layer(load_decoder(path), number)
    mixed = with_chains(with_another_layer(loaded(path, Tiled(*names)), number))
    assert mixed is not None
    assert [type(layer) is FusedDecoderLayer for layer in mixed.layers] == [at != number for at in range(3)]
    assert num_fused(mixed) == 2
    assert type(mixed.layers[number]) is PostNormLayer
    for chunks in (MIXED, DECODED):
        pairs = (paged_logits(decoder, prompts(), block_size=8, chunks=chunks) for decoder in (plain, mixed))
        for expected, found in zip(*pairs, strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def subclass(part: Any) -> None:
    """Return a subclass with the same parts and numbers, but perhaps another formula."""
    part.__class__ = type("Another", (type(part),), {})


#: Field of LayerForm -> what changes it in a layer.
CHANGES: dict[str, Callable[[DecoderLayer], None]] = {
    "layer": subclass,
    "norms": lambda layer: subclass(layer.post_attention_norm),
    "attention": lambda layer: subclass(layer.attention),
    "rope": lambda layer: subclass(layer.attention.rotary),
    "ffn": lambda layer: subclass(layer.mlp),
    "qk_norms": lambda layer: subclass(layer.attention.qk_norm.k),  # type: ignore[union-attr]
}


def refused(decoder: Decoder, number: int) -> bool:
    """Check that the chain refuses the layer and leaves its weights untouched."""
    layer = decoder.layers[number]
    before = [target.tensor.clone() for leaf in layer.leaves() for target in leaf.targets()]
    fused = with_chains(decoder)
    after = [target.tensor for leaf in layer.leaves() for target in leaf.targets()]
    is_plain = fused is None or fused.layers[number] is layer
    return is_plain and all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.usefixtures("row_major")
@pytest.mark.parametrize("field", LayerForm._fields)
def test_a_layer_whose_form_differs_in_one_field_is_never_run_as_another(field: str, tmp_path: Path) -> None:
    decoder = load_decoder(save(make_model("qwen3"), tmp_path))
    layer = decoder.layers[1]
    before = layer.form
    CHANGES[field](layer)
    assert [name for name in LayerForm._fields if getattr(layer.form, name) != getattr(before, name)] == [field]
    assert refused(decoder, 1)


def other_eps(decoder: Decoder) -> None:
    decoder.layers[1].attention.qk_norm.k.eps = 0.1  # type: ignore[union-attr]


def store_in_eight_bits(decoder: Decoder) -> None:
    for layer in decoder.layers:
        kept = layer.attention.kv.format
        layer.attention.kv = LayerKV(PageFormat(kept.heads, kept.width, "float8_e4m3fn"))


@pytest.mark.usefixtures("row_major")
@pytest.mark.parametrize("change", [other_eps, store_in_eight_bits])
def test_a_layer_with_numbers_that_the_kernels_are_not_given_is_refused(change: Any, tmp_path: Path) -> None:
    decoder = load_decoder(save(make_model("qwen3"), tmp_path))
    change(decoder)
    assert refused(decoder, 1)


class Rounded(Unquantized):
    """A format without products of its own; folds nothing."""

    def fold(self, linear: Linear) -> Folded:
        return Folded.NO

    def gemm(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Gemm | None:
        return None


@pytest.mark.usefixtures("row_major")
@pytest.mark.parametrize("name", ["qkv", "output", "gate_up", "down"])
def test_a_layer_with_weights_in_a_format_without_such_products_is_refused(name: str, tmp_path: Path) -> None:
    decoder = load_decoder(save(make_model("qwen2"), tmp_path))
    layer = decoder.layers[1]
    linear: Linear = getattr(layer.attention if name in ("qkv", "output") else layer.mlp, name)
    linear.method = Rounded()
    assert refused(decoder, 1)


@pytest.mark.usefixtures("row_major")
def test_the_product_of_a_head_uses_the_tile_of_its_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tile] = []
    monkeypatch.setattr(head, "logits_launch", lambda hidden, weight, tile: taken.append(tile))
    monkeypatch.setattr(head, "sample_launch", lambda hidden, weight, metadata, tile: taken.append(tile))
    # Of 33 to 64 rows and of none the library has it.
    tiles = {rows: Tile("gemv", rows, 32, 1, 2) for rows in (8, 16, 32, 128)}
    monkeypatch.setattr(Unquantized, "tile", lambda method, linear, num_rows, epilogue: tiles.get(num_rows))
    decoder = load_decoder(save(make_model("qwen2"), tmp_path))
    decoder.head._sample = lambda logits, metadata: torch.zeros(len(logits))
    fused = decoder.head.fused()
    for num_rows, bucket in {0: 0, 1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 33: 0, 64: 0, 65: 128, 128: 128, 129: 0}.items():
        taken.clear()
        hidden = torch.zeros(num_rows, decoder.norm.weight.shape[0])
        fused.logits(hidden)
        fused.sample(hidden, None)  # type: ignore[arg-type]
        assert taken == ([tiles[bucket]] * 2 if bucket else [])
        taken.clear()
        decoder.logits(hidden)
        assert not taken


def test_a_decoder_on_a_cpu_stays_as_it_is(tmp_path: Path) -> None:
    decoder = load_decoder(save(make_model("qwen2"), tmp_path))
    norms = [layer.input_norm.weight.clone() for layer in decoder.layers]
    assert fuse(decoder) is None
    assert num_fused(decoder) == 0
    assert all(torch.equal(layer.input_norm.weight, norm) for layer, norm in zip(decoder.layers, norms, strict=True))
