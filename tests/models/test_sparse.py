"""Models with experts: names of checkpoints, ties, busy and idle experts, padding, NaN, formats, ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_grpc.config.flags import ModelFlags, ServeConfig
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import FORMATS
from photon_grpc.config.weight_bytes import kv_token_bytes, linear_bytes
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import TORCH
from photon_grpc.layers import unquantized
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.experts import MOST_TOKENS, SparseMLP
from photon_grpc.models import build
from photon_grpc.models.fused import num_fused, with_chains
from photon_grpc.models.weights import dummy, linears_of
from photon_grpc.service.processes.check_start import check_model
from tests.models import quantized, reference


@pytest.fixture(scope="module", params=reference.SPARSE)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    model = reference.make_model(request.param)
    return request.param, model, reference.save(model, tmp_path_factory.mktemp("sparse") / request.param)


def block_of(path: Path, layer: int = 0) -> SparseMLP:
    block = reference.load_decoder(path).layers[layer].mlp
    assert isinstance(block, SparseMLP)
    return block


def hidden(num_tokens: int, seed: int = 9) -> torch.Tensor:
    return torch.randn(num_tokens, reference.SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed))


def context(num_tokens: int, num_real: int | None = None) -> StepContext:
    real = None if num_real is None else torch.tensor([num_real], dtype=torch.int32)
    return StepContext(torch.arange(num_tokens), (), num_real=real)


def test_stacked_tensors_load_as_those_of_each_expert(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    variant, model, path = saved
    model.save_pretrained(tmp_path, save_original_format=False)
    stacked = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stacked), variant
    assert any(".experts.0." in name for name in load_file(path / "model.safetensors"))
    check_model(ServeConfig(model=ModelFlags(model=str(tmp_path))))
    ids = reference.prompts()[0]
    found, expected = (
        reference.paged_logits(reference.load_decoder(of), [ids], block_size=16, chunks=[11])[0]
        for of in (tmp_path, path)
    )
    assert torch.equal(found, expected)


def test_a_missing_expert_is_named(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, _, path = saved
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in sorted(tensors) if ".experts.3." in name)
    del tensors[name]
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"missing: {name}".replace(".", "[.]")):
        reference.load_decoder(tmp_path)


def test_all_tokens_may_reach_the_same_experts_and_equal_numbers_reach_the_first(
    saved: tuple[str, Any, Path],
) -> None:
    block, x = block_of(saved[2]), hidden(40)
    block.router.weight.zero_()
    routing = block.router(x, context(40))
    top_k = block.router.form.top_k
    assert torch.equal(routing.experts, torch.arange(top_k).expand(40, -1).int())
    y = block(x, context(40))
    parts = [down(TORCH.swiglu(gate_up(x, None)), None) for gate_up, down in block.experts.experts[:top_k]]
    torch.testing.assert_close(y, (torch.stack(parts) * routing.weights.t()[:, :, None]).sum(0))


def test_padding_reaches_no_expert_and_may_be_nan(saved: tuple[str, Any, Path]) -> None:
    block, x = block_of(saved[2]), hidden(9)
    x[6:] = torch.nan
    before = block.router.tally.clone()  # type: ignore[union-attr]
    y = block(x, context(9, 6))
    calls, reached, busiest, pairs = (block.router.tally - before).tolist()  # type: ignore[operator]
    torch.testing.assert_close(y[:6], block(x[:6], context(6)))
    assert not y[6:].any()
    assert (calls, pairs) == (1, 6 * block.router.form.top_k)
    assert 0 < busiest <= 6 <= reached * busiest
    assert not block(x, context(9, 0)).any()


def test_a_token_that_is_nan_fails_alone(saved: tuple[str, Any, Path]) -> None:
    block, x = block_of(saved[2]), hidden(5)
    expected = block(x, context(5))
    x[2, 7] = torch.nan
    y = block(x, context(5))
    others = [0, 1, 3, 4]
    assert y[2].isnan().all()
    torch.testing.assert_close(y[others], expected[others])


def test_long_steps_are_computed_in_parts(saved: tuple[str, Any, Path]) -> None:
    block, num_tokens = block_of(saved[2]), MOST_TOKENS + 70
    x = hidden(64).repeat(-(-num_tokens // 64), 1)[:num_tokens]
    y = block(x, context(num_tokens, num_tokens - 30))
    torch.testing.assert_close(y[:64], block(x[:64], context(64)))
    torch.testing.assert_close(y[MOST_TOKENS : MOST_TOKENS + 40], y[:40])
    assert not y[-30:].any()


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("int8-g64",)])
def test_every_format_is_computed(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    model = reference.make_model("qwen3moe", **sizes)
    path = reference.save(model, tmp_path)
    x = torch.randn(37, 128, generator=torch.Generator().manual_seed(9))
    expected = block_of(path)(x, context(37))
    decoder = reference.load_decoder(path, quantization=name)
    block = decoder.layers[0].mlp
    assert isinstance(block, SparseMLP)
    assert all(not isinstance(linear.weight, torch.Tensor) for linear in block.experts.linears())
    found = block(x, context(37))
    rounded = 0.2 if name.startswith("int4") else 0.08
    assert 0 < (found - expected).norm() <= rounded * expected.norm()
    (logits,) = reference.paged_logits(decoder, [reference.prompts()[0]], block_size=16, chunks=[11, 26])
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["int8-g128", "int4-g128", "w8a8", "fp8", "fp8-block"])
def test_stacks_of_every_format_give_the_products_of_their_linears(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("photon_grpc.layers.quantization.weight_only.pack_quantized", lambda weight, bias: None)
    monkeypatch.setattr(reference, "select", lambda kind, device: replace(TORCH, stacks_experts=True))
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    path = reference.save(reference.make_model("qwen3moe", **sizes), tmp_path)
    block = reference.load_decoder(path, quantization=name).layers[0].mlp
    assert isinstance(block, SparseMLP) and block.experts.stacks is not None
    x = torch.randn(21, 128, generator=torch.Generator().manual_seed(9))
    stacked = block(x, context(21))
    block.experts.stacks = None
    torch.testing.assert_close(stacked, block(x, context(21)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("form", [None, FORMATS["int8"]])
@pytest.mark.parametrize("variant", ["qwen3moe-between", "deepseek2", "deepseek2-yarn-query-latent", "deepseek3"])
def test_bytes_told_before_a_start_are_those_held(
    variant: str, form: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("photon_grpc.layers.quantization.weight_only.pack_quantized", lambda weight, bias: None)
    monkeypatch.setattr("photon_grpc.layers.unquantized.pack", lambda weight, bias: None)
    path = reference.save(reference.make_model(variant), tmp_path)
    config = read_model_dir(path)
    decoder = reference.load_decoder(path, quantization="auto" if form is None else form.name)
    assert linear_bytes(config, form) == sum(linear.method.num_bytes(linear) for linear in linears_of(decoder))
    assert kv_token_bytes(config) == sum(layer.attention.kv.format.token_bytes for layer in decoder.layers)


def test_stacks_are_computed_as_experts_on_their_own(
    saved: tuple[str, Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, in torch: weights stay in rows and are stacked, also in layers of fused kernels."""
    _, model, path = saved
    stacking = replace(TORCH, stacks_experts=True)
    monkeypatch.setattr(unquantized, "pack", lambda weight, bias: None)
    monkeypatch.setattr(reference, "select", lambda kind, device: stacking)
    decoder = reference.load_decoder(path)
    blocks = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, SparseMLP)]
    for block in blocks:
        stacks, first = block.experts.stacks, block.experts.experts[0]
        assert stacks is not None
        assert first.gate_up.weight.data_ptr() == stacks.gate_up.values.data_ptr()
    ids = reference.prompts()[0]
    expected = reference.reference_logits(model, ids)
    (found,) = reference.paged_logits(decoder, [ids], block_size=16, chunks=[11, 1])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    fused = with_chains(decoder)
    assert fused is not None and num_fused(fused) == len(decoder.layers)
    (found,) = reference.paged_logits(fused, [ids], block_size=16, chunks=[11, 1])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("layout", ["gptq", "awq", "w8a16", "fp8"])
def test_quantized_checkpoints_have_the_experts_that_their_format_says(layout: str, tmp_path: Path) -> None:
    written = quantized.LAYOUTS[layout]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    model = reference.make_model("qwen3moe", num_key_value_heads=4, **sizes)
    paths = [reference.save(model, tmp_path / kind) for kind in ("floats", "codes")]
    floats, codes = load_file(paths[0] / "model.safetensors"), {}
    for name, weight in floats.items():
        if not quantized.is_quantized(name):
            codes[name] = weight
            continue
        stored, floats[name] = written.quantize(weight)
        codes |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in stored.items()}
    for path, tensors in zip(paths, (floats, codes), strict=True):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    reference.edit_json(paths[1] / "config.json", quantization_config=written.config)
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(9))
    found, expected = (block_of(path)(x, context(9)) for path in reversed(paths))
    tolerance = 0.08 if layout == "fp8" else 1e-4
    assert (found - expected).norm() <= tolerance * expected.norm()


def test_random_weights_are_of_every_expert(saved: tuple[str, Any, Path]) -> None:
    config = read_model_dir(saved[2])
    decoder = build(config, dtype=torch.float32, device="cpu", kernels=TORCH, max_model_len=16)
    dummy(decoder)
    block = decoder.layers[0].mlp
    assert isinstance(block, SparseMLP)
    first, second = (expert.gate_up(hidden(1), None) for expert in block.experts.experts[:2])
    assert first.abs().max() > 0
    assert not torch.equal(first, second)
    assert block(hidden(3), context(3)).isfinite().all()


@pytest.mark.parametrize(
    ("variant", "keys", "said"),
    [
        (
            "deepseek2",
            {"first_k_dense_replace": 2},
            "first_k_dense_replace, moe_layer_freq give layer 1 no experts, .* has some there",
        ),
        (
            "deepseek2",
            {"first_k_dense_replace": 0},
            "first_k_dense_replace, moe_layer_freq give layer 0 experts, .* has none there",
        ),
        ("deepseek2", {"moe_layer_freq": 2}, "moe_layer_freq give layer 1 no experts, .* has some there"),
        ("qwen3moe", {"mlp_only_layers": [1]}, "mlp_only_layers give layer 1 no experts, .* has some there"),
        ("qwen3moe", {"num_hidden_layers": 9}, r"missing: model\.layers\."),
        ("deepseek2", {"num_hidden_layers": 9}, r"missing: model\.layers\."),
    ],
)
def test_experts_in_other_layers_than_config_json_says_are_refused_by_its_keys(
    variant: str, keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = reference.save(reference.make_model(variant), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(ModelLoadError, match=said):
        reference.load_decoder(path)


def test_a_layer_without_the_experts_that_its_architecture_has_is_refused_by_that(tmp_path: Path) -> None:
    path = reference.save(reference.make_model("mixtral"), tmp_path)
    file = path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1.block_sparse_moe" not in name}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"architectures give layer 1 experts, but the checkpoint has none there"):
        reference.load_decoder(path)
