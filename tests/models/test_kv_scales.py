"""Keys and values of 8 bits: logits are those of transformers over rounded ones, with scales from each place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_grpc.config.kv_calibration import FILE, FORMAT, KVCalibration, write_calibration
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.errors import ConfigError, ModelLoadError
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE
from photon_grpc.models.kv_scales import NAMES, KVScales, find_kv_scales, set_kv_scales
from tests.models import reference
from tests.runner.eight_bits import logits_of

HEADS, LAYERS = reference.SIZES["num_key_value_heads"], reference.SIZES["num_hidden_layers"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = reference.make_model("qwen3")
    return model, reference.save(model, tmp_path_factory.mktemp("qwen3"))


def scales_of(seed: int) -> torch.Tensor:
    """Return scales of every layer, plane and head, no powers of two."""
    return 0.004 + 0.02 * torch.rand(LAYERS, 2, HEADS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.each_value
@pytest.mark.parametrize("variant", ["llama3-tied", "qwen3", "qwen2-window", "gemma3"])
@pytest.mark.parametrize(("block_size", "chunks"), [(16, [1000]), (8, [11, 3, 1, 26]), (64, [1])])
def test_logits_equal_transformers_over_rounded_keys(
    variant: str, block_size: int, chunks: list[int], tmp_path: Path
) -> None:
    model = reference.make_model(variant)
    decoder = reference.load_decoder(reference.save(model, tmp_path), kv_dtype=PAGE_DTYPE)
    config = model.config
    generator = torch.Generator().manual_seed(7)
    scales = 0.1 + 0.2 * torch.rand(config.num_hidden_layers, 2, config.num_key_value_heads, generator=generator)
    kept = decoder.kv_groups[0].sections[0].format
    offsets = torch.randn(config.num_hidden_layers, kept.heads, kept.width, generator=generator)
    set_kv_scales(decoder, KVScales(scales, "here", offsets))
    batch = reference.prompts()
    found = reference.paged_logits(decoder, batch, block_size=block_size, chunks=chunks)
    for ids, logits in zip(batch, found, strict=True):
        expected = logits_of(model, ids, scales, offsets)
        in_full = reference.reference_logits(model, ids)
        assert expected.std() > 0.5 and (expected - in_full).abs().max() > 0.02  # else closeness says nothing
        # A key that is near the middle of two numbers may round to the other one.
        difference = (logits - expected).abs()
        assert difference.median() < 1e-5 and difference.max() < 0.1 * (expected - in_full).abs().max()
    assert decoder.layers[0].attention.scales.saturated.item() == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_scales_of_a_checkpoint_are_read_under_every_name(
    names: tuple[str, str], per_head: bool, saved: tuple[Any, Path], tmp_path: Path
) -> None:
    _, path = saved
    scales = scales_of(1) if per_head else scales_of(1)[..., :1].expand(-1, -1, HEADS)
    if names[0] == names[1]:
        scales = scales[:, :1].expand(-1, 2, -1)
    copied = with_tensors(path, tmp_path, tensors_of(names, scales, per_head))
    found = find_kv_scales(read_model_dir(copied), "")
    assert found.source == "the checkpoint" and torch.equal(found.numbers, scales)
    # They are no weights: a model in 16 bits loads beside them.
    reference.load_decoder(copied)


def tensors_of(names: tuple[str, str], scales: torch.Tensor, per_head: bool) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": (
            scales[layer, plane] if per_head else scales[layer, plane, 0]
        ).clone()
        for layer in range(LAYERS)
        for plane, name in enumerate(names)
    }


def with_tensors(path: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (to / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(load_file(path / "model.safetensors") | tensors, to / "model.safetensors")
    return to


def set_nan(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.tensor(torch.nan)


def set_zero(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.tensor(0.0)


def set_more(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.ones(HEADS + 1)


@pytest.mark.parametrize("spoil", [dict.pop, set_nan, set_zero, set_more], ids=["missing", "nan", "zero", "more"])
def test_a_scale_that_is_missing_or_wrong_is_refused_by_name(spoil: Any, saved: Any, tmp_path: Path) -> None:
    tensors, name = tensors_of(NAMES[0], scales_of(2), True), "model.layers.1.self_attn.v_scale"
    spoil(tensors, name)
    with pytest.raises(ModelLoadError, match=name):
        find_kv_scales(read_model_dir(with_tensors(saved[1], tmp_path, tensors)), "")


def calibration_of(path: Path, scales: torch.Tensor) -> KVCalibration:
    keys, values = scales.transpose(0, 1).tolist()
    revision = read_model_dir(path).revision
    return KVCalibration(FORMAT, revision, "float8_e4m3fn", 100, tuple(map(tuple, keys)), tuple(map(tuple, values)))


def test_a_file_that_is_named_counts_before_the_checkpoint_and_one_beside_it_after(saved: Any, tmp_path: Path) -> None:
    in_checkpoint, beside, named = (scales_of(seed) for seed in (3, 4, 5))
    (tmp_path / "plain").mkdir()
    plain = with_tensors(saved[1], tmp_path / "plain", {})
    for at, numbers in ((plain / FILE, beside), (tmp_path / "named.json", named)):
        write_calibration(calibration_of(plain, numbers), at)
    found = find_kv_scales(read_model_dir(plain), "")
    assert torch.equal(found.numbers, beside) and found.source == str(plain / FILE)
    assert torch.equal(find_kv_scales(read_model_dir(plain), str(tmp_path / "named.json")).numbers, named)
    (tmp_path / "scaled").mkdir()
    scaled = with_tensors(saved[1], tmp_path / "scaled", tensors_of(NAMES[0], in_checkpoint, True))
    write_calibration(calibration_of(scaled, beside), scaled / FILE)
    assert torch.equal(find_kv_scales(read_model_dir(scaled), "").numbers, in_checkpoint)


def test_without_any_scales_they_are_1(saved: Any) -> None:
    found = find_kv_scales(read_model_dir(saved[1]), "")
    assert found.source == "" and torch.equal(found.numbers, torch.ones(LAYERS, 2, HEADS))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"revision": "other"}, "another model"),
        ({"format": "other"}, "format is 'other'"),
        ({"keys": [[1.0] * HEADS]}, f"keys must have {LAYERS} layers of {HEADS} heads"),
        ({"values": [[1.0] * (HEADS + 1)] * LAYERS}, "values must have"),
        ({"values": [[0.0] * HEADS] * LAYERS}, r"values\[0\]\[0\]"),
        ({"keys": None}, "keys is null"),
        ({"key_offsets": [[[0.5]] * HEADS] * LAYERS}, f"key_offsets must have {LAYERS} layers of {HEADS} heads of"),
    ],
)
def test_a_file_that_is_malformed_or_another_models_is_refused(
    changes: dict[str, Any], told: str, saved: Any, tmp_path: Path
) -> None:
    file = tmp_path / "scales.json"
    write_calibration(calibration_of(saved[1], scales_of(6)), file)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=told) as failure:
        find_kv_scales(read_model_dir(saved[1]), str(file))
    assert failure.value.field == "kv_calibration" and str(file) in str(failure.value)
