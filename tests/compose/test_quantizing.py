"""`quantize` writes a checkpoint whose products of a text are close to those of 16 bits, and `serve` loads it."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_grpc import LLM, demo
from photon_grpc.cli import quantize as verb
from photon_grpc.cli.main import main
from photon_grpc.compose import quantizing
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import FORMATS
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind, dequantize
from photon_grpc.layers.quantization import gptq
from photon_grpc.layers.quantization.rounding import quantized
from photon_grpc.layers.quantization.stored import Codes


def numbers(codes: Codes) -> torch.Tensor:
    """Return W in float64."""
    return dequantize(QuantizedWeight(*codes, kind=WeightKind(4, 128)), torch.float32).double()


def inputs(rows: int, columns: int) -> torch.Tensor:
    """Return inputs that go together: few directions, and noise."""
    generator = torch.Generator().manual_seed(columns)
    directions = torch.randn(columns // 8, columns, generator=generator)
    return torch.randn(rows, columns // 8, generator=generator) @ directions + 0.1 * torch.randn(rows, columns)


def test_products_lose_less_than_by_rounding_to_the_nearest() -> None:
    x, w = inputs(2048, 384), torch.randn(64, 384, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ w.double().t()
    nearest = quantized([("w", slice(0, 64))], w, FORMATS["int4-g128"], torch.bfloat16)
    found = gptq.rounded(w, x.t() @ x, 128, torch.bfloat16)
    errors = [(x.double() @ numbers(codes).t() - exact).norm() for codes in (nearest, found)]
    assert errors[1] < 0.6 * errors[0]
    assert found.values.shape == (64, 192) and found.scales.shape == (3, 64)


def test_blocks_lose_less_than_by_rounding_to_the_nearest() -> None:
    x, w = inputs(2048, 384), torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ w.double().t()
    errors = []
    for codes in (
        quantized([("w", slice(0, 256))], w, FORMATS["fp8-block"], torch.float32),
        gptq.rounded_blocks(w, x.t() @ x),
    ):
        assert codes.values.dtype == torch.float8_e4m3fn and codes.scales.shape == (3, 2)
        scales = codes.scales.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        errors.append((x.double() @ (codes.values.double() * scales.double()).t() - exact).norm())
    assert errors[1] < 0.6 * errors[0]


def test_the_root_is_that_of_the_inverse() -> None:
    x = inputs(512, 64).double()
    damped = x.t() @ x
    root = gptq.inverse_root(damped).double()
    torch.testing.assert_close(root.t() @ root @ damped, torch.eye(64).double(), rtol=1e-3, atol=1e-3)
    assert torch.equal(root, root.triu())


def test_inputs_that_do_not_go_together_leave_rounding_to_the_nearest() -> None:
    w = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    # Scales of checkpoints are positive. Those of weights quantized at load are, too, if the numbers of the largest
    # size are negative.
    w[:, ::128] = -4.5
    nearest = quantized([("w", slice(0, 32))], w, FORMATS["int4-g128"], torch.bfloat16)
    found = gptq.rounded(w, torch.eye(256), 128, torch.bfloat16)
    assert torch.equal(found.values, nearest.values) and torch.equal(found.scales, nearest.scales)
    assert bool((gptq.rounded(-w, torch.eye(256), 128, torch.bfloat16).scales > 0).all())


def test_inputs_that_were_always_zero_do_no_harm() -> None:
    w, moments = torch.randn(16, 256, generator=torch.Generator().manual_seed(2)), torch.zeros(256, 256)
    for _ in range(2):
        found = numbers(gptq.rounded(w, moments, 128, torch.bfloat16))
        assert (found - w).norm() < 0.15 * w.norm()
        moments[:100, :100] = torch.eye(100)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the draft model in 4 bits."""
    output = tmp_path_factory.mktemp("quantized") / "draft"
    text = tmp_path_factory.mktemp("text") / "text.py"
    text.write_text(Path(__file__).read_text())
    asked = ["quantize", str(demo.DRAFT), "--output", str(output), "--text", str(text), "--num-tokens", "600"]
    assert main([*asked, "--device", "cpu"]) == 0
    return output


def test_the_checkpoint_has_the_weights_of_every_projection(written: Path) -> None:
    config, before = read_model_dir(written), load_file(demo.DRAFT / "model.safetensors")
    after = load_file(written / "model.safetensors")
    assert config.quantization is not None and config.quantization.name == "int4-g128 (pack-quantized)"
    kept = {name for name in before if not name.endswith("_proj.weight")}
    assert kept == {name for name in after if "_proj." not in name}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    for name, weight in before.items():
        if name not in kept:
            packed, scale = after[name + "_packed"], after[name + "_scale"]
            codes = Codes(packed.view(torch.uint8), scale.t().contiguous())
            error = (numbers(codes) - weight.double()).norm() / weight.double().norm()
            assert 0.02 < error < 0.2, name
            assert after[name + "_shape"].tolist() == list(weight.shape)
    assert (written / "tokenizer.json").read_bytes() == (demo.DRAFT / "tokenizer.json").read_bytes()


def loss(**flags: str) -> float:
    """Return the mean negative log-probability of a text that was not read."""
    text = Path(__file__).with_name("conftest.py").read_text()[:2000]
    with LLM(device="cpu", **flags) as llm:
        (found,) = llm.generate([text], prompt_logprobs=1, max_tokens=1, temperature=0.0)
    scores = [-score.logprob for score in found.prompt_scores[1:] if score.logprob is not None]
    return sum(scores) / len(scores)


def test_what_is_written_is_served_and_loses_less_than_without_a_text(written: Path) -> None:
    whole = loss(model=str(demo.DRAFT))
    nearest = loss(model=str(demo.DRAFT), quantization="int4-g128")
    assert loss(model=str(written)) - whole < 0.7 * (nearest - whole)


def test_e4m3_in_blocks_is_served(tmp_path: Path) -> None:
    asked = ["quantize", str(demo.DRAFT), "--output", str(tmp_path), "--format", "fp8-block", "--text", __file__]
    assert main([*asked, "--num-tokens", "600", "--device", "cpu"]) == 0
    form = read_model_dir(tmp_path).quantization
    assert form is not None and form.kind == "fp8" and form.block == (128, 128)
    left = [name for name in form.ignored if name != "lm_head"]
    before, after = load_file(demo.DRAFT / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    for name in [name.removesuffix(".weight") for name in before if name.endswith("_proj.weight")]:
        is_quantized = after[name + ".weight"].dtype == torch.float8_e4m3fn
        assert is_quantized == (name not in left) == (name + ".weight_scale_inv" in after)
    assert abs(loss(model=str(tmp_path)) - loss(model=str(demo.DRAFT))) < 0.05


def test_a_text_is_written_by_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "OWN_LENGTH", 7)
    own = verb.own_text(demo.DRAFT, 24, "cpu")
    assert [len(piece) for piece in own] == [8, 8, 8]
    assert own == verb.own_text(demo.DRAFT, 24, "cpu")


def test_sums_are_made_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sized:
        def __init__(self, in_features: int) -> None:
            self.in_features = in_features

    monkeypatch.setattr(quantizing, "MAX_SUM_BYTES", 4 * (100 + 64))
    linears = [Sized(size) for size in (10, 8, 1, 30, 2)]
    parts = [[one.in_features for one in part] for part in quantizing._shares(linears)]  # type: ignore[arg-type]
    assert parts == [[10, 8], [1], [30], [2]]


def test_files_of_several_parts_stay_several_and_weights_of_other_forms_are_left_out(tmp_path: Path) -> None:
    directory = tmp_path / "parts"
    shutil.copytree(demo.DRAFT, directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, directory / file)
    places = {name: file for file, some in files.items() for name in some}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    of_others = ("pytorch_model.bin", "pytorch_model.bin.index.json", "training_args.pt", "model-Q4.gguf")
    for name in of_others:
        (directory / name).write_text("{}")
    quantizing.quantize(directory, tmp_path / "out", quantizing.pieces_of(directory, "x = 1\n" * 50, 64), "cpu")
    assert read_model_dir(tmp_path / "out").quantization is not None
    assert not {*of_others} & {file.name for file in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "tokenizer.json").exists()
    with LLM(str(tmp_path / "out"), device="cpu") as llm:
        assert llm.generate(["x"], max_tokens=1)


def test_scales_of_keys_of_the_old_weights_are_left_out(tmp_path: Path) -> None:
    assert (demo.TARGET / "kv_scales.json").exists()
    quantizing.quantize(demo.TARGET, tmp_path, quantizing.pieces_of(demo.TARGET, "x = 1\n" * 50, 64), "cpu")
    with LLM(str(tmp_path), device="cpu", kv_cache_dtype="fp8") as llm:
        assert llm.generate(["x"], max_tokens=1)


def test_what_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("x = 1\n" * 50)
    asked = ["quantize", str(demo.DRAFT), "--device", "cpu"]
    # Before the model writes a text.
    assert main([*asked, "--output", str(tmp_path / "text" / "o")]) == 1
    assert "Not a directory" in capsys.readouterr().err
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert main([*asked, "--output", str(tmp_path / "o"), "--text", str(tmp_path / "text")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "model.safetensors: " in capsys.readouterr().err
    assert not (tmp_path / "o" / "config.json").exists()


def test_a_model_that_no_projection_suits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(quantizing.FORMS, "fp8-block", quantizing.FORMS["fp8-block"]._replace(fits=lambda one: False))
    asked = ["quantize", str(demo.DRAFT), "--output", str(tmp_path / "o"), "--format", "fp8-block", "--text", __file__]
    assert main([*asked, "--num-tokens", "100", "--device", "cpu"]) == 2
    assert "no projection whose size suits fp8-block" in capsys.readouterr().err
    assert not list((tmp_path / "o").iterdir())


def test_what_cannot_be_quantized_is_told(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(written), "--output", str(tmp_path / "o")]) == 2
    assert "is quantized already: int4-g128" in capsys.readouterr().err
    assert main(["quantize", str(demo.DRAFT), "--output", str(written)]) == 2
    assert "not an empty directory" in capsys.readouterr().err
    (tmp_path / "empty").write_text("")
    assert main(["quantize", str(demo.DRAFT), "--output", str(tmp_path / "o"), "--text", str(tmp_path / "empty")]) == 2
    assert "no tokens" in capsys.readouterr().err
