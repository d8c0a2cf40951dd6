"""Families with layers of their own: their forms, long rotary embedding, quantized weights, every tensor's name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from photon_grpc import LLM
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import WeightFormat
from photon_grpc.config.resolve import resolve
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import select
from photon_grpc.layers.parallel.group import LoneRank, Mesh
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import Decoder, build
from photon_grpc.models.chains import CHAINS
from photon_grpc.models.decoder import DecoderLayer
from photon_grpc.models.fused import with_chains
from photon_grpc.service.processes import check_start
from tests.models import reference

#: A variant of each family.
VARIANTS = ("mistral-window", "phi3-window-partial-longrope-tied", "smollm3", "olmo2", "gemma3", "qwen3moe")


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Return a variant, transformers' model of it and its files."""
    model = reference.make_model(request.param)
    return request.param, model, reference.save(model, tmp_path_factory.mktemp("family") / request.param)


def parts(layer: DecoderLayer) -> Iterator[tuple[str, Any]]:
    """Return every part of a layer whose class stands for a formula; norms of the residual stream by their place."""
    yield "layer", layer
    for place, norm in enumerate(layer.norms):
        yield f"norm {place}", norm
    yield "attention", layer.attention
    yield "rotary", layer.attention.rotary
    yield "mlp", layer.mlp
    if layer.attention.qk_norm is not None:
        yield "q norm", layer.attention.qk_norm.q
        yield "k norm", layer.attention.qk_norm.k


def test_another_class_of_any_part_is_another_form(saved: tuple[str, Any, Path]) -> None:
    decoder = reference.load_decoder(saved[2])
    for number in range(len(decoder.layers)):
        before = decoder.layers[number].form
        for name, _ in parts(decoder.layers[number]):
            layer = copy.copy(decoder.layers[number])
            for holder in ("attention", "sandwich"):
                if hasattr(layer, holder):
                    setattr(layer, holder, copy.copy(getattr(layer, holder)))
            part = dict(parts(layer))[name]
            original = part.__class__
            part.__class__ = type("Another", (original,), {})
            try:
                assert layer.form != before, name
            finally:
                part.__class__ = original
            assert decoder.layers[number].form == before


def test_only_layers_of_a_chains_form_run_in_it(saved: tuple[str, Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("photon_grpc.layers.unquantized.pack", lambda weight, bias: None)
    variant, model, path = saved
    decoder = reference.load_decoder(path)
    number = len(decoder.layers)
    chained = "mistral-window", "qwen3moe", "gemma3", "phi3-window-partial-longrope-tied"
    expected = {"smollm3": [True, False, True], **dict.fromkeys(chained, [True] * number)}.get(
        variant, [False] * number
    )
    assert [layer.form in CHAINS for layer in decoder.layers] == expected
    mixed = with_chains(decoder)
    assert (mixed is not None) == any(expected)
    ids = reference.prompts()[0]
    (found,) = reference.paged_logits(mixed or decoder, [ids], block_size=16, chunks=[1])
    torch.testing.assert_close(found, reference.reference_logits(model, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("variant", ["mistral-window", "phi3", "smollm3", "olmo2", "gemma3"])
def test_weights_quantized_at_load_are_the_rounded_ones(variant: str, tmp_path: Path) -> None:
    model = reference.make_model(variant, hidden_size=128, intermediate_size=128, num_attention_heads=4, head_dim=32)
    path = reference.save(model, tmp_path)
    ids = reference.prompts()[2]
    round_to_eight_bits(model)
    decoder = reference.load_decoder(path, quantization="int8-g128")
    (found,) = reference.paged_logits(decoder, [ids], block_size=16, chunks=[9, 30])
    torch.testing.assert_close(found, reference.reference_logits(model, ids), atol=1e-3, rtol=0)
    for format in ("w8a8", "int4-g128"):
        (found,) = reference.paged_logits(
            reference.load_decoder(path, quantization=format), [ids], block_size=16, chunks=[9, 30]
        )
        assert found.isfinite().all()


@torch.no_grad()
def round_to_eight_bits(model: Any) -> None:
    """Round the weights of the layers' projections to 255 steps of a row, times the norm that is before them."""
    for layer in model.model.layers:
        before = {"qkv": getattr(layer, "input_layernorm", None), "gu": None}
        if hasattr(layer, "input_layernorm"):
            before["gu"] = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear):
                norm = next((before[key] for key in before if name.rpartition(".")[2][0] in key), None)
                folded = torch.ones(()) if norm is None else norm.weight
                folded = 1 + folded if type(norm).__name__ == "Gemma3RMSNorm" else folded
                weight = module.weight * folded
                scale = weight.abs().amax(dim=1, keepdim=True) / 127
                module.weight.copy_((weight / scale).round() * scale / folded)


def test_bfloat16_is_as_near_as_transformers_own(saved: tuple[str, Any, Path]) -> None:
    variant, model, path = saved
    if variant in reference.SPARSE:
        pytest.skip("a rounded number may choose another expert")
    ids = reference.prompts()[2]
    expected = reference.reference_logits(model, ids)
    theirs = reference.reference_logits(copy.deepcopy(model).bfloat16(), ids)
    (found,) = reference.paged_logits(
        reference.load_decoder(path, torch.bfloat16), [ids], block_size=16, chunks=[9, 30]
    )
    assert (found - expected).norm() <= 2 * (theirs - expected).norm()


def test_a_model_is_served_with_its_text(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, model, path = saved
    served = tmp_path / "served"
    shutil.copytree(path, served)
    prompt = reference.prompts()[0]
    with LLM(served, device="cpu", max_model_len=reference.MAX_LEN, num_blocks=64, max_num_seqs=4) as llm:
        (found,) = llm.generate([prompt], max_tokens=12, temperature=0, ignore_eos=True)
    expected = list(prompt)
    for _ in range(12):
        expected.append(int(reference.reference_logits(model, expected)[-1].argmax()))
    assert list(found.token_ids) == expected[len(prompt) :]


def test_long_factors_belong_to_the_version_of_the_numerics(tmp_path: Path) -> None:
    path = reference.save(reference.make_model("phi3-window-partial-longrope-tied"), tmp_path)
    given = {"model": str(path), "device": "cpu"}
    versions = [
        check_start.numerics_version(resolve(given | {"max_model_len": length}, {}).config) for length in (50, 96, 97)
    ]
    assert versions[0] == versions[1] != versions[2]
    with LLM(path, device="cpu", max_model_len=97, num_blocks=16) as llm:
        found = llm._program.model_facts().numerics
    assert (found.version, found.kv_cache) == (versions[2], "float32, rotated by long factors")


@pytest.mark.parametrize("change", ["missing", "surplus", "shape"])
def test_a_tensor_that_is_wrong_is_refused_by_name(saved: tuple[str, Any, Path], tmp_path: Path, change: str) -> None:
    path = tmp_path / "wrong"
    shutil.copytree(saved[2], path)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in sorted(tensors) if "norm" in name)
    if change == "missing":
        del tensors[name]
    elif change == "surplus":
        name = name.replace("norm", "other")
        tensors[name] = torch.ones(3)
    else:
        tensors[name] = torch.ones(3)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=name.replace(".", "[.]")):
        reference.load_decoder(path)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_text_part_of_a_model_with_images_is_transformers_own(is_tied: bool, tmp_path: Path) -> None:
    text = reference.SIZES | reference.VARIANTS["gemma3"][1]
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=copy.deepcopy(text) | {"tie_word_embeddings": is_tied},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=is_tied,
        **dict.fromkeys(("boi_token_index", "eoi_token_index", "image_token_index"), 130),
    )
    torch.manual_seed(3)
    kind = transformers.Gemma3ForConditionalGeneration
    model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    path = reference.save(model, tmp_path)
    reread = kind.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    ids = [number % 130 for number in reference.prompts()[2]]
    (found,) = reference.paged_logits(reference.load_decoder(path), [ids], block_size=8, chunks=[11, 30])
    torch.testing.assert_close(found, reference.reference_logits(reread, ids), atol=1e-4, rtol=0)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"text_config": 7}))
    with pytest.raises(ModelLoadError, match="text_config must be an object, is 7"):
        read_model_dir(path)


def test_quantized_rows_of_merged_projections_cannot_be_shared_out(tmp_path: Path) -> None:
    card = read_model_dir(reference.save(reference.make_model("phi3"), tmp_path))
    form = WeightFormat("int4", (1, 32), layout="gptq")
    two = LoneRank(0, 2)
    with pytest.raises(ModelLoadError, match="qkv_proj: quantized rows of merged projections cannot be shared out"):
        build(
            card, dtype=torch.float32, device="cpu", kernels=select("torch", "cpu"), max_model_len=8,
            mesh=Mesh(tp=two, world=two), method=methods(form),
        )  # fmt: skip


def long_decoder(path: Path, max_model_len: int) -> Decoder:
    """Load for contexts of at most `max_model_len` tokens."""
    kept, reference.MAX_LEN = reference.MAX_LEN, max_model_len
    try:
        return reference.load_decoder(path)
    finally:
        reference.MAX_LEN = kept


def test_long_factors_are_for_models_that_may_have_a_longer_context_than_the_original(tmp_path: Path) -> None:
    model = reference.make_model("phi3-window-partial-longrope-tied")
    path = reference.save(model, tmp_path)
    values = json.loads((path / "config.json").read_text())
    values["rope_parameters"]["original_max_position_embeddings"] = values["original_max_position_embeddings"] = 40
    (path / "config.json").write_text(json.dumps(values))
    reread = type(model).from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    long, short = long_decoder(path, 96), long_decoder(path, 40)
    for decoder, prompt in ((long, reference.prompts()[2]), (short, reference.prompts()[0])):
        # transformers chooses by the length of the call: 70 is above 40, 37 is not.
        expected = reference.reference_logits(reread, prompt)
        for chunks in ([1000], [11, 3, 1]):
            (found,) = reference.paged_logits(decoder, [prompt], block_size=8, chunks=chunks)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert not torch.equal(long.layers[0].attention.rotary.sin[:40], short.layers[0].attention.rotary.sin)
