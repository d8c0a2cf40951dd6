"""Quantized checkpoints, written by others' formulas: the weights that they stand for, and every way to be wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from photon_grpc import LLM
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import FORMATS
from photon_grpc.config.resolve import resolve
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import select
from photon_grpc.kernels.linear.weight import QuantizedWeight, dequantize
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.prepacked_quantized import pack_quantized
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import Decoder, build, dummy, load
from photon_grpc.models.fused import FusedDecoderLayer, with_chains
from photon_grpc.models.weights import linear_bytes
from photon_grpc.service.processes import check_start
from tests.models import quantized, reference
from tests.models.quantized import EIGHT_BITS, FILE, LAYOUTS
from tests.models.test_parallel import of_two_ranks

pytest.importorskip("compressed_tensors")
WEIGHT_ONLY = [name for name in LAYOUTS if name not in EIGHT_BITS]


@pytest.fixture(autouse=True)
def row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights as a GPU has them: not packed for this CPU."""
    monkeypatch.setattr("photon_grpc.layers.quantization.weight_only.pack_quantized", lambda weight, bias: None)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return layout -> a directory that no test changes, and transformers' model with its weights."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(layout: str) -> tuple[Path, Any]:
        if layout not in made:
            path = tmp_path_factory.mktemp("written")
            made[layout] = path, quantized.write(path, layout)
        return made[layout]

    return get


def dequantized(weight: Any) -> torch.Tensor:
    """Return W, float32 [N, K]."""
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, torch.float32)
    scales = weight.scales
    if len(scales) > 1 or scales.shape[1] != len(weight.values):
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.values.float() * scales.t()


def weights_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the weight of every quantized projection by its name."""
    found = {}
    for leaf in decoder.leaves():
        if isinstance(leaf, Linear) and leaf is not decoder.head:
            whole = dequantized(leaf.weight)
            found |= {name + ".weight": whole[rows] for name, rows in leaf.slices()}
    return found


def assert_weights_equal(decoder: Decoder, model: Any) -> None:
    expected = {name: weight for name, weight in model.named_parameters() if quantized.is_quantized(name)}
    found = weights_of(decoder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def assert_logits_equal(decoder: Decoder, model: Any, tolerance: float = 2e-4) -> None:
    found = reference.paged_logits(decoder, reference.prompts(), block_size=16, chunks=[11, 3, 1, 26])
    for ids, logits in zip(reference.prompts(), found, strict=True):
        torch.testing.assert_close(logits, reference.reference_logits(model, ids), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_has_the_weights_that_its_format_says(layout: str, written: Any) -> None:
    path, model = written(layout)
    assert_weights_equal(reference.load_decoder(path), model)


@pytest.mark.parametrize("layout", WEIGHT_ONLY)
def test_logits_equal_those_of_the_dequantized_model(layout: str, written: Any) -> None:
    path, model = written(layout)
    assert_logits_equal(reference.load_decoder(path), model)


def with_targets(layout: str, *targets: str) -> dict[str, Any]:
    """Return the config_groups of a layout of compressed-tensors with these targets."""
    return {"config_groups": {"group_0": LAYOUTS[layout].config["config_groups"]["group_0"] | {"targets": targets}}}


ATTENTION = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]
LEFT_OUT: list[tuple[str, str, dict[str, Any]]] = [
    ("awq", "self_attn", {"modules_to_not_convert": ["self_attn"]}),
    ("awq", "layers.1.mlp", {"modules_to_not_convert": ["layers.1.mlp"]}),
    ("gptq", ".mlp.", {"modules_in_block_to_quantize": ATTENTION}),
    ("gptq", ".o_proj", {"dynamic": {r"-:.*\.o_proj$": {}}}),
    ("w4a16", ".mlp.", with_targets("w4a16", "re:.*self_attn.*")),
    ("w8a8", "layers.0.", {"ignore": ["lm_head", r"re:.*layers\.0\..*"]}),
    ("fp8", "down_proj", {"modules_to_not_convert": ["lm_head", *(f"model.layers.{n}.mlp.down_proj" for n in (0, 1))]}),
]


@pytest.mark.parametrize(("layout", "part", "keys"), LEFT_OUT, ids=lambda value: value if type(value) is str else "")
def test_modules_that_are_left_out_keep_their_weights(
    layout: str, part: str, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("photon_grpc.layers.unquantized.pack", lambda weight, bias: None)
    model = quantized.write(tmp_path, layout, part, **keys)
    assert_weights_equal(reference.load_decoder(tmp_path), model)


class Rounding(torch.nn.Module):
    """A Linear whose input is rounded to 8 bits, `columns` at a time; float64."""

    def __init__(self, linear: torch.nn.Linear, columns: int, is_float: bool) -> None:
        super().__init__()
        self.linear, self.columns, self.is_float = linear, columns, is_float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (-1, self.columns or x.shape[-1]))
        scale = parts.abs().amax(-1, keepdim=True) / (448 if self.is_float else 127)
        numbers = parts / scale
        numbers = numbers.to(torch.float8_e4m3fn).float() if self.is_float else numbers.round()
        y = (numbers.double() * scale).flatten(-2) @ self.linear.weight.double().t()
        return y.float() if self.linear.bias is None else y.float() + self.linear.bias


@pytest.mark.parametrize("layout", EIGHT_BITS)
def test_activations_have_eight_bits_where_the_format_says_so(layout: str, written: Any, tmp_path: Path) -> None:
    model = quantized.write(tmp_path, layout)
    columns = 128 if layout in ("fp8", "fp8-blocks") else 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name.endswith("_proj"):
                setattr(module, name, Rounding(child, columns, layout != "w8a8"))
    found = reference.paged_logits(reference.load_decoder(tmp_path), reference.prompts(), block_size=16, chunks=[7, 2])
    exact = [reference.reference_logits(written(layout)[1], ids) for ids in reference.prompts()]
    rounded = [reference.reference_logits(model, ids) for ids in reference.prompts()]
    # A number that stands between two codes may fall to either side: a few logits differ by a little.
    distance = torch.cat(found).sub(torch.cat(rounded)).norm()
    assert distance < 0.25 * torch.cat(rounded).sub(torch.cat(exact)).norm()


@pytest.mark.parametrize("block", [True, False])
def test_transformers_reads_the_same_fp8_weights(block: bool, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # It asks for accelerate before it dequantizes on a CPU, and does without.
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    path, _ = written("fp8" if block else "fp8-whole")
    config = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128) if block else None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.float32)
    assert_weights_equal(reference.load_decoder(path), theirs)


@pytest.mark.parametrize("layout", ["w4a16-asymmetric", "w8a8", "fp8-rows"])
def test_transformers_reads_the_same_compressed_tensors(layout: str, written: Any) -> None:
    path, _ = written(layout)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.float32)
    assert_weights_equal(reference.load_decoder(path), theirs)


@pytest.mark.parametrize("layout", ["awq", "w4a16-asymmetric"])
def test_greedy_ids_equal_those_of_the_dequantized_model(layout: str, written: Any) -> None:
    path, model = written(layout)
    prompts = [ids[:20] for ids in reference.prompts()]
    with LLM(path, device="cpu", dtype="float32", num_blocks=64) as llm:
        found = llm.generate(prompts, max_tokens=24, temperature=0, ignore_eos=True)
        form = llm._program.model_facts().quantization
    assert form == read_model_dir(path).quantization.name  # type: ignore[union-attr]
    for ids, completion in zip(prompts, found, strict=True):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        assert list(completion.token_ids) == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("layout", ["gptq-asymmetric", "awq", "w4a16", "w8a16", "w8a16-rows"])
def test_fused_layers_read_the_norm_beside_the_weight(layout: str, written: Any) -> None:
    path, model = written(layout)
    decoder = reference.load_decoder(path)
    norms = [layer.input_norm.weight.clone() for layer in decoder.layers]
    fused = with_chains(decoder)
    assert fused is not None
    assert all(isinstance(layer, FusedDecoderLayer) for layer in fused.layers)
    assert_logits_equal(fused, model)
    assert all(torch.equal(layer.input_norm.weight, norm) for layer, norm in zip(decoder.layers, norms, strict=True))


@pytest.mark.parametrize("layout", ["gptq-asymmetric", "gptq-8-bits", "awq", "w4a16-asymmetric", "w8a16-rows"])
def test_two_ranks_have_the_weights_of_one(layout: str, written: Any) -> None:
    path, model = written(layout)
    decoders = of_two_ranks(path)

    def logits(decoder: Decoder) -> list[torch.Tensor]:
        return reference.paged_logits(decoder, reference.prompts(), block_size=16, chunks=[11, 3, 1, 26])

    whole = weights_of(reference.load_decoder(path))
    parts = [weights_of(decoder) for decoder in decoders]
    for name, weight in whole.items():
        axis = 1 if "o_proj" in name or "down_proj" in name else 0
        assert torch.equal(torch.cat([part[name] for part in parts], axis), weight)
    with ThreadPoolExecutor(2) as threads:
        for mine in threads.map(logits, decoders):
            for ids, found in zip(reference.prompts(), mine, strict=True):
                torch.testing.assert_close(found, reference.reference_logits(model, ids), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("quantization", ["int8-g32", "int8-g64"])
def test_two_ranks_quantize_groups_as_one_does(quantization: str, tmp_path: Path) -> None:
    path = reference.save(quantized.make_model(), tmp_path)
    whole = weights_of(reference.load_decoder(path, quantization=quantization))
    parts = [weights_of(decoder) for decoder in of_two_ranks(path, quantization)]
    for name, weight in whole.items():
        axis = 1 if "o_proj" in name or "down_proj" in name else 0
        assert torch.equal(torch.cat([part[name] for part in parts], axis), weight)


@pytest.mark.parametrize("quantization", ["int8", "int8-g64", "int4-g128"])
def test_fused_layers_equal_others_where_weights_were_quantized_with_their_norms(
    quantization: str, tmp_path: Path
) -> None:
    decoder = reference.load_decoder(reference.save(quantized.make_model(), tmp_path), quantization=quantization)
    fused = with_chains(decoder)
    assert fused is not None
    assert all(isinstance(layer, FusedDecoderLayer) for layer in fused.layers)
    # Few tokens beside others, and one token a row.
    for chunks in ([5, 1, 50, *[5, 1, 1] * 20], [30, 1, 58, *[1] * 36]):
        pairs = (
            reference.paged_logits(one, reference.prompts(), block_size=8, chunks=chunks) for one in (decoder, fused)
        )
        for expected, found in zip(*pairs, strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_is_rounded_to_nearest_on_request(is_tied: bool, tmp_path: Path) -> None:
    model = quantized.make_model(tie_word_embeddings=is_tied)
    config = read_model_dir(reference.save(model, tmp_path))
    decoder = build(
        config, dtype=torch.float32, device="cpu", kernels=select("torch", "cpu"), max_model_len=64,
        method=methods(replace(FORMATS["w8a8"], head="int8")),
    )  # fmt: skip
    load(decoder, config)
    weight = model.lm_head.weight.detach()
    scales = weight.abs().amax(1, keepdim=True) / 127
    x = torch.randn(3, weight.shape[1])
    expected = x @ ((weight / scales).round() * scales).t()
    torch.testing.assert_close(decoder.head.logits(x), expected, rtol=1e-5, atol=1e-5)
    # Tied or not, its bytes are counted.
    others = sum(
        one.method.num_bytes(one) for layer in decoder.layers for one in layer.leaves() if hasattr(one, "method")
    )
    assert linear_bytes(decoder)[0] - others == weight.numel() + scales.nbytes


@pytest.mark.parametrize("layout", ["gptq", "gptq-8-bits", "awq", "w4a16-asymmetric", "w8a16", "w8a8", "fp8"])
def test_dummy_weights_in_a_layout_have_the_deviation_of_others(layout: str, written: Any) -> None:
    config = read_model_dir(written(layout)[0])
    found = []
    for _ in range(2):
        decoder = build(
            config, dtype=torch.float32, device="cpu", kernels=select("torch", "cpu"), max_model_len=64,
            method=methods(config.quantization),
        )  # fmt: skip
        dummy(decoder, 5)
        found.append(weights_of(decoder))
    for name, weight in found[0].items():
        assert torch.equal(weight, found[1][name])
        assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
        assert abs(float(weight.mean())) < 0.004


Q = "model.layers.1.self_attn.q_proj"


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change of one tensor of q_proj."""
    return lambda tensors: tensors.update({Q + name: change(tensors[Q + name].clone()).contiguous()})


def with_value(value: float, *at: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[at] = value
        return tensor

    return change


def with_byte(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8)[3, 5] = value
        return tensor

    return change


WRONG: list[tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = [
    ("gptq", put(".scales", with_value(torch.nan, 1, 5)), f"{Q}.scales: 1 of 256 scales are negative or .* is nan"),
    ("gptq", put(".scales", with_value(torch.inf, 0, 0)), f"{Q}.scales: 1 of 256 .* is inf"),
    ("gptq", put(".scales", torch.zeros_like), f"{Q}.scales: all 256 scales are 0 in float32"),
    ("awq", put(".scales", with_value(-0.5, 1, 0)), f"{Q}.scales: 1 of 256 .* is -0.5"),
    ("gptq", put(".scales", lambda s: torch.full(s.shape, 1e38)), f"{Q}.scales: with the scale .* infinite"),
    ("gptq", put(".scales", lambda s: s[:1]), rf"{Q}.scales has shape \[1, 128\], config.json asks for \[2, 128\]"),
    ("gptq", lambda t: t.pop(Q + ".scales"), f"missing: {Q}.scales"),
    ("gptq", lambda t: t.pop(Q + ".qzeros"), f"missing: {Q}.qzeros"),
    ("gptq", put(".qzeros", with_value(0x77777776, 0, 0)), f"{Q}.qzeros: has the zero point 7; .* which is 8"),
    ("gptq-asymmetric", put(".qzeros", with_value(-1, 0, 0)), f"{Q}.qzeros: has the zero point 16; 4 bits end at 15"),
    ("gptq", put(".g_idx", lambda g: g.flip(0)), f"{Q}.g_idx: puts column 0 into group 1, in order it is in group 0"),
    ("gptq", put(".g_idx", lambda g: g[:64]), rf"{Q}.g_idx has shape \[64\], config.json asks for \[128\]"),
    ("gptq", put(".qweight", lambda q: q.float()), f"{Q}.qweight has dtype F32; it must be I32"),
    ("gptq", put(".qweight", lambda q: q.t()), rf"{Q}.qweight has shape \[128, 16\], config.json asks for \[16, 128\]"),
    ("awq", lambda t: t.update({Q + ".weight": torch.ones(128, 128)}), f"do not belong to .*: {Q}.weight"),
    ("awq", lambda t: t.update({Q + ".g_idx": torch.zeros(128)}), f"do not belong to .*: {Q}.g_idx"),
    ("w4a16", put(".weight_shape", with_value(64, 1)), rf"{Q}.weight_shape: .* \[128, 64\], .* \[128, 128\]"),
    ("w4a16", lambda t: t.pop(Q + ".weight_packed"), f"missing: {Q}.weight_packed"),
    ("w4a16", put(".weight_scale", lambda s: s.long()), f"{Q}.weight_scale has dtype I64; only F32, BF16, F16"),
    ("w4a16-asymmetric", lambda t: t.pop(Q + ".weight_zero_point"), f"missing: {Q}.weight_zero_point"),
    ("w4a16", lambda t: t.update({Q + ".weight_zero_point": torch.zeros(16, 4)}), f"belong.*{Q}.weight_zero_point"),
    ("w8a8", put(".weight_scale", with_value(-1.0, 3, 0)), f"{Q}.weight_scale: 1 of 128 .* is -1.0"),
    ("w8a8", put(".weight", lambda w: w.to(torch.uint8)), f"{Q}.weight has dtype U8; it must be I8"),
    ("w8a8", lambda t: t.update({Q + ".input_scale": torch.ones(1)}), f"do not belong to .*: {Q}.input_scale"),
    ("fp8", put(".weight", with_byte(0x7F)), f"{Q}.weight: 1 of 16384 values are NaN"),
    ("fp8-whole", put(".weight", with_byte(0xFF)), f"{Q}.weight: 1 of 16384 values are NaN"),
    ("fp8-whole", put(".weight_scale_inv", torch.zeros_like), f"{Q}.weight_scale_inv: all 1 scales are 0"),
    ("fp8", put(".weight", lambda w: w.float()), f"{Q}.weight has dtype F32; it must be F8_E4M3"),
    ("fp8", put(".weight_scale_inv", lambda s: s.view(())), ""),
    ("fp8", put(".weight_scale_inv", lambda s: s.expand(1, 2)), rf"{Q}.weight_scale_inv has shape \[1, 2\]"),
    ("fp8-whole", put(".weight_scale_inv", lambda s: s * torch.nan), f"{Q}.weight_scale_inv: 1 of 1 scales"),
]  # fmt: skip


@pytest.mark.parametrize("case", [number for number, (*_, said) in enumerate(WRONG) if said])
def test_wrong_tensors_are_refused_by_name(case: int, written: Any, tmp_path: Path) -> None:
    layout, change, said = WRONG[case]
    path = Path(shutil.copytree(written(layout)[0], tmp_path / "copy"))
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=said):
        reference.load_decoder(path)
    with pytest.raises(ModelLoadError, match=said):
        check_start.check_model(resolve({"model": str(path), "device": "cpu"}, {}).config)


CHANGED = [
    ("gptq", {"group_size": 32}, "qzeros has shape"),
    ("gptq", {"bits": 8}, "qweight has shape"),
    ("gptq", {"checkpoint_format": "gptq_v2"}, "has the zero point 7; .* which is 8"),
    ("gptq-asymmetric", {"sym": True}, "has the zero point .* which is 8"),
    ("awq", {"group_size": 128}, "qzeros has shape"),
    ("awq", {"modules_to_not_convert": ["q_proj"]}, "q_proj and .*k_proj are multiplied as one weight"),
    ("awq", {"modules_to_not_convert": ["down_proj"]}, "missing: model.layers.0.mlp.down_proj.weight"),
    ("w8a8", {"ignore": ["re:.*gate_proj"]}, "gate_proj and .*up_proj are multiplied as one weight"),
    ("fp8", {"weight_block_size": None}, "weight_scale_inv has shape"),
]


@pytest.mark.parametrize(("layout", "changes", "said"), CHANGED)
def test_a_config_that_lies_about_its_tensors_is_refused(
    layout: str, changes: dict[str, Any], said: str, written: Any, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(written(layout)[0], tmp_path / "copy"))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=said):
        reference.load_decoder(path)


#: Layout -> the suffix of its scales, and some of them.
ZERO = {
    "gptq": (".scales", (0, 5)), "awq": (".scales", (1, slice(8))), "w4a16-asymmetric": (".weight_scale", (3, 0)),
    "w8a16": (".weight_scale", (slice(4), 0)), "w8a16-rows": (".weight_scale", (127, 0)),
    "w8a8": (".weight_scale", (2, 0)), "fp8-rows": (".weight_scale", (0, 0)),
}  # fmt: skip
ROWS_OF_0 = ("w8a16-rows", "w8a8", "fp8-rows")


@pytest.mark.parametrize("layout", ZERO)
@pytest.mark.parametrize("is_packed", [False, True])
def test_weights_with_a_scale_of_0_are_0(
    layout: str, is_packed: bool, written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of padded rows and pruned channels; packed: for this CPU."""
    if is_packed:
        monkeypatch.setattr("photon_grpc.layers.quantization.weight_only.pack_quantized", pack_quantized)
    path = Path(shutil.copytree(written(layout)[0], tmp_path / "copy"))
    tensors = load_file(path / FILE)
    suffix, at = ZERO[layout]
    scales = tensors[Q + suffix]
    assert scales[at].all()
    scales[at] = 0.0
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    check_start.check_model(resolve({"model": str(path), "device": "cpu"}, {}).config)
    expected, found = (products_of(reference.load_decoder(one)) for one in (written(layout)[0], path))
    is_zero = expected.ne(0) & found.eq(0)
    assert is_zero.any()
    assert found.isfinite().all()
    if layout in ROWS_OF_0:
        # A whole row is 0, and others are as they were.
        assert torch.equal(torch.where(is_zero, 0, expected), found)


def test_a_scale_that_the_models_type_cannot_hold_is_refused(written: Any, tmp_path: Path) -> None:
    path = Path(shutil.copytree(written("w8a16-rows")[0], tmp_path / "copy"))
    tensors = load_file(path / FILE)
    tensors[Q + ".weight_scale"][3:5] = 2e-9
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    said = f"{Q}.weight_scale: 2 of 128 scales become 0 in float16, whose smallest .* is 6.1e-05; the first is 2.0e-09"
    with pytest.raises(ModelLoadError, match=said):
        reference.load_decoder(path, torch.float16)
    for dtype, reasons in (("float16", 1), ("bfloat16", 0)):
        config = resolve({"model": str(path), "device": "cpu", "dtype": dtype}, {}).config
        assert len([reason for reason in check_start.reasons(config) if re.search(said, reason)]) == reasons


def test_weights_that_are_not_read_in_time_are_said_to_be_left(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(written("fp8")[0], tmp_path / "copy"))
    given = {"model": str(path), "device": "cpu", "listen": ("127.0.0.1:0",)}
    config, notes = resolve(given, {}).config, list[str]()
    assert check_start.reasons(config, notes) == [] == notes
    monkeypatch.setattr(check_start, "READING_TIME_S", -1.0)
    assert check_start.reasons(config, notes) == []
    assert len(notes) == 1 and re.search("0.0 GB of weights were not searched for NaN within -1 s; loading", notes[0])


def products_of(decoder: Decoder) -> torch.Tensor:
    """Return q_proj's products with unit vectors, which are its columns, less its bias, which a packed weight has."""
    (linear,) = (leaf for leaf in decoder.leaves() if isinstance(leaf, Linear) and Q in dict(leaf.slices()))
    rows = dict(linear.slices())[Q]
    whole = linear(torch.eye(linear.in_features), None) - linear(torch.zeros(1, linear.in_features), None)
    return whole[:, rows]


def test_older_places_of_the_configuration_are_read(written: Any, tmp_path: Path) -> None:
    for layout, name in (("gptq", "quantize_config.json"), ("w4a16", "config.json")):
        path, model = written(layout)
        copy = Path(shutil.copytree(path, tmp_path / layout))
        values = json.loads((copy / "config.json").read_text())
        said = values.pop("quantization_config")
        if layout == "gptq":
            del said["quant_method"]
            (copy / "config.json").write_text(json.dumps(values))
        else:
            said = values | {"compression_config": said}
        (copy / name).write_text(json.dumps(said))
        assert_weights_equal(reference.load_decoder(copy), model)
        if layout == "gptq":
            before = read_model_dir(copy).revision
            (copy / name).write_text(json.dumps(said | {"damp_percent": 0.5}))
            assert read_model_dir(copy).revision != before
            (copy / name).write_text(json.dumps(said | {"desc_act": True}))
            with pytest.raises(ModelLoadError, match=r"desc_act is true.*\(read from quantize_config.json\)"):
                read_model_dir(copy)
            (copy / name).unlink()
            (copy / name).symlink_to("nowhere")
            with pytest.raises(ModelLoadError, match=r"quantize_config.json: there is no such file"):
                read_model_dir(copy)


def test_quantized_tensors_without_a_quantization_config_are_named(written: Any, tmp_path: Path) -> None:
    path = Path(shutil.copytree(written("gptq")[0], tmp_path / "copy"))
    (path / "quantize_config.json").unlink(missing_ok=True)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"need a quantization_config: .*qweight"):
        reference.load_decoder(path, torch.float32)


def test_tensors_that_follow_from_others_may_be_missing(written: Any, tmp_path: Path) -> None:
    for layout, name in (("gptq", "g_idx"), ("w4a16", "weight_shape")):
        path, model = written(layout)
        copy = Path(shutil.copytree(path, tmp_path / layout))
        tensors = {key: tensor for key, tensor in load_file(copy / FILE).items() if not key.endswith(name)}
        save_file(tensors, copy / FILE, metadata={"format": "pt"})
        assert_weights_equal(reference.load_decoder(copy), model)
