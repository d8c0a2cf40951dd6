"""`quantization_config` of config.json: what each dialect means, and that nothing wrong is read as something else."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.config.quantization import FORMATS, WeightFormat, chosen_format
from photon_grpc.config.quantization_config import read_quantization
from photon_grpc.errors import ConfigError, ModelLoadError

GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq",
    "damp_percent": 0.1, "true_sequential": True, "modules_in_block_to_quantize": None, "dataset": None,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
       "modules_to_not_convert": None}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {},
    }  # fmt: skip


def args(**changes: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None,
            "dynamic": False, "actorder": None, "observer": "minmax"} | changes  # fmt: skip


TOKENS = args(strategy="token", dynamic=True)
#: Scales of keys and values as --kv-cache-dtype fp8 takes them.
KV = args(type="float", strategy="tensor")
W4A16 = compressed("pack-quantized", args(num_bits=4, strategy="group", group_size=128))
W8A8 = compressed("int-quantized", args(), TOKENS)
FP8_TOKENS = compressed("float-quantized", args(type="float"), TOKENS | {"type": "float"})
FP8_BLOCKS = compressed(
    "float-quantized",
    args(type="float", strategy="block", block_structure=[128, 128]),
    TOKENS | {"type": "float", "strategy": "group", "group_size": 128},
)
GOOD = [
    (GPTQ, "int4-g128 (gptq)", WeightFormat("int4", (1, 128), 16, False, "gptq", ("lm_head",))),
    (GPTQ | {"bits": 8, "group_size": 32}, "int8-g32 (gptq)", None),
    (GPTQ | {"group_size": -1, "sym": False}, "int4 (gptq)",
     WeightFormat("int4", (1, 0), 16, True, "gptq", ("lm_head",))),
    (GPTQ | {"checkpoint_format": "gptq_v2", "lm_head": True}, "int4-g128 (gptq_v2)", None),
    (GPTQ | {"dynamic": {"-:.*mlp.gate$": {}}}, "int4-g128 (gptq)",
     WeightFormat("int4", (1, 128), 16, False, "gptq", ("lm_head", "re:.*mlp.gate$"))),
    (AWQ, "int4-g128 (awq)", WeightFormat("int4", (1, 128), 16, True, "awq", ("lm_head",))),
    (AWQ | {"version": "GEMM", "modules_to_not_convert": ["o_proj"]}, "int4-g128 (awq)", None),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4-g64 (awq)", None),
    (FP8, "fp8-block (fp8)", WeightFormat("fp8", (128, 128), 8, False, "fp8", ("lm_head",))),
    (FP8 | {"weight_block_size": None}, "fp8 (fp8)", WeightFormat("fp8", (0, 0), 8, False, "fp8", ("lm_head",))),
    (W4A16, "int4-g128 (pack-quantized)", None),
    (compressed("pack-quantized", args(num_bits=4, strategy="group", group_size=64, symmetric=False)),
     "int4-g64 (pack-quantized)", WeightFormat("int4", (1, 64), 16, True, "pack-quantized", ("lm_head",))),
    (compressed("pack-quantized", args()), "int8 (pack-quantized)", None),
    (compressed("int-quantized", args()), "int8 (int-quantized)", None),
    (W8A8, "w8a8 (int-quantized)", WeightFormat("int8", (1, 0), 8, False, "int-quantized", ("lm_head",))),
    (FP8_TOKENS, "fp8 (float-quantized)", WeightFormat("fp8", (1, 0), 8, False, "float-quantized", ("lm_head",))),
    (FP8_BLOCKS, "fp8-block (float-quantized)", None),
]  # fmt: skip


def numbered(value: object) -> str:
    """Return a short id: that of a config is its number."""
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("config", "name", "expected"), GOOD, ids=numbered)
def test_a_dialect_says_how_weights_are_stored(
    config: dict[str, Any], name: str, expected: WeightFormat | None
) -> None:
    found = read_quantization(config)
    assert found is not None
    assert found.name == name
    assert expected in (None, found)


WRONG = [
    ("bitsandbytes", "quant_method is 'bitsandbytes'", "awq, compressed-tensors, fp8; load the 16-bit"),
    (GPTQ | {"quant_method": "marlin"}, "quant_method is 'marlin'", "GPTQ"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format", "GPTQ source"),
    (GPTQ | {"desc_act": True}, "desc_act", "desc_act false"),
    (GPTQ | {"bits": 3}, "bits is 3", "4, 8"),
    (GPTQ | {"bits": 8, "sym": False}, "sym", "4 bits"),
    (GPTQ | {"group_size": 96}, "group_size is 96", "32, 64, 128"),
    (GPTQ | {"dynamic": {"-:.*gate$": {}, "+:.*": {}}}, "dynamic has the rule '+:.*'", "module"),
    (GPTQ | {"dynamic": {"-:(": {}}}, "dynamic", "regular expression"),
    (GPTQ | {"modules_in_block_to_quantize": [["q_proj"], 3]}, "modules_in_block_to_quantize", "lists of names"),
    (GPTQ | {"modules_in_block_to_quantize": [[]]}, "modules_in_block_to_quantize", "no module"),
    (GPTQ | {"checkpoint_format": "gptq_v2", "format": "gptq"}, "checkpoint_format is 'gptq_v2'", "must agree"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format", "GPTQ source"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'", "int32"),
    (GPTQ | {"rotation": "hadamard"}, "rotation", "not supported"),
    (GPTQ | {"adapter": {"name": "lora"}}, "adapter", "not supported"),
    (GPTQ | {"block_name_to_quantize": "decoder.layers"}, "block_name_to_quantize", "model.layers"),
    (AWQ | {"w_bit": 8}, "w_bit", "must agree"),
    (AWQ | {"q_group_size": 64}, "q_group_size", "must agree"),
    (AWQ | {"format": "gemv"}, "format", "must agree"),
    (AWQ | {"version": None, "format": "gemv_fast"}, "format is 'gemv_fast'", "gemm"),
    (AWQ | {"backend": "llm-awq"}, "backend", "AutoAWQ"),
    (AWQ | {"version": "gemv"}, "version is 'gemv'", "gemm"),
    (AWQ | {"zero_point": False}, "zero_point", "true"),
    (AWQ | {"w_bit": 8, "bits": 8}, "bits is 8", "4"),
    (FP8 | {"activation_scheme": "static"}, "activation_scheme", "dynamic"),
    (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'", "e4m3"),
    (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt", "float"),
    (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size", "[128, 128]"),
    (W8A8 | {"kv_cache_scheme": args()}, "kv_cache_scheme.type is 'int'", "float"),
    (W8A8 | {"kv_cache_scheme": KV | {"dynamic": True}}, "kv_cache_scheme.dynamic", "false"),
    (W8A8 | {"kv_cache_scheme": KV | {"num_bits": 4}}, "kv_cache_scheme.num_bits is 4", "8"),
    (W8A8 | {"kv_cache_scheme": KV | {"symmetric": False}}, "kv_cache_scheme.symmetric", "true"),
    (W8A8 | {"kv_cache_scheme": KV | {"strategy": "token"}}, "kv_cache_scheme.strategy", "attn_head"),
    (W8A8 | {"kv_cache_scheme": {"format": "dense"}}, "kv_cache_scheme", "missing"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups", "0 groups"),
    (W8A8 | {"moe_sparsity_config": {"num_experts": 2}}, "moe_sparsity_config", "null"),
    (W8A8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config", "not supported"),
    (W8A8 | {"format": "marlin-24"}, "format is 'marlin-24'", "int-quantized"),
    (W8A8 | {"quantization_status": "frozen"}, "quantization_status", "compressed"),
    (W8A8 | {"config_groups": {}}, "config_groups", "0 groups"),
    (W8A8 | {"ignore": ["re:("]}, "ignore", "regular expression"),
    (W8A8 | {"ignore": ["re:a{99999999999999999999}"]}, "ignore", "regular expression"),
    (W8A8 | {"ignore": [""]}, "ignore", "empty"),
    (compressed("int-quantized", args(), TOKENS | {"dynamic": False}), "input_activations.dynamic", "true"),
    (compressed("int-quantized", args(), TOKENS | {"strategy": "tensor"}), "input_activations.strategy", "token"),
    (compressed("pack-quantized", args(actorder="group")), "weights.actorder", "static"),
    (compressed("pack-quantized", args(actorder="dynamic")), "weights.actorder is 'dynamic'", "static"),
    (compressed("pack-quantized", args(group_size=128)), "weights.group_size is 128", "null"),
    (compressed("pack-quantized", args(strategy="group", group_size=-1)), "weights.group_size is -1", "32, 64, 128"),
    (compressed("pack-quantized", args(block_structure=[128, 128])), "weights.block_structure", "null"),
    (compressed("pack-quantized", args(scale_dtype="torch.uint8")), "weights.scale_dtype is 'uint8'", "bfloat16"),
    (compressed("int-quantized", args(), TOKENS | {"actorder": "x"}), "input_activations.actorder is 'x'", "null"),
    (compressed("int-quantized", args(dynamic="")), "weights.dynamic", "own"),
    (compressed("int-quantized", args(), TOKENS | {"group_size": 128}), "input_activations.group_size", "null"),
    (compressed("pack-quantized", args(num_bits=2)), "weights.num_bits is 2", "4, 8"),
    (compressed("float-quantized", args(type="float")), "input_activations is missing", "FP8"),
    (compressed("pack-quantized", args(symmetric=False)), "weights.symmetric", "4 bits"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "says", "remedy"), WRONG, ids=numbered)
def test_what_is_not_supported_is_refused_by_name_with_what_is(config: Any, says: str, remedy: str) -> None:
    value = {"quant_method": config} if isinstance(config, str) else config
    with pytest.raises(ModelLoadError) as refused:
        read_quantization(value)
    assert says in str(refused.value)
    assert remedy in str(refused.value)


#: Keys that record how a checkpoint was made and say nothing about its weights.
MEANINGLESS = {"damp_percent", "true_sequential", "dataset", "observer"}
#: Keys for which some of the values below are right.
SWITCHES = {"sym", "symmetric", "zero_point", "desc_act", "dynamic", "lm_head"}
NAMES = {"ignore", "modules_to_not_convert"}
WRONG_VALUES = [7, -5, 1.5, "x", "", [], ["a"], [[]], {"a": 1}, True, False, 2**70, float("nan")]
#: Keys without which a checkpoint has no meaning, or another one.
NEEDED = {"quant_method", "bits", "group_size", "weight_block_size", "config_groups", "group_0", "format", "targets",
          "weights", "block_structure"}  # fmt: skip


def is_right(key: str, value: object) -> bool:
    """Return whether a value of WRONG_VALUES may stand under the key."""
    is_unset = key in ("modules_in_block_to_quantize", "actorder") and value in (False, "", [])
    is_switch = key in SWITCHES and isinstance(value, bool)
    # What stands under a rule that leaves modules out has no meaning.
    return (
        key in MEANINGLESS or key.startswith("-:") or is_switch or is_unset or (key in NAMES and value in ([], ["a"]))
    )


def keys_of(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        found.append((*path, key))
        if isinstance(value, dict):
            found += keys_of(value, (*path, key))
    return found


def parent(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path[:-1]:
        config = config[key]
    return config


@given(st.sampled_from([config for config, _, _ in GOOD]), st.data())
def test_a_wrong_value_under_any_key_is_refused_by_its_name(config: dict[str, Any], data: Any) -> None:
    path = data.draw(st.sampled_from(keys_of(config)))
    wrong = data.draw(st.sampled_from(WRONG_VALUES))
    changed = copy.deepcopy(config)
    parent(changed, path)[path[-1]] = wrong
    try:
        read_quantization(changed)
    except ModelLoadError as error:
        # Some values are right by themselves and contradict another key.
        assert path[-1] in str(error) or is_right(path[-1], wrong), (path, wrong, str(error))
    else:
        assert is_right(path[-1], wrong), (path, wrong)


@pytest.mark.parametrize("config", [GPTQ, FP8, W4A16, W8A8, FP8_TOKENS, FP8_BLOCKS])
def test_a_needed_key_that_is_missing_is_named(config: dict[str, Any]) -> None:
    for path in keys_of(config):
        if path[-1] in NEEDED and parent(config, path)[path[-1]] is not None:
            changed = copy.deepcopy(config)
            del parent(changed, path)[path[-1]]
            with pytest.raises(ModelLoadError, match=f"quantization_config.*{path[-1].removesuffix('_0')}"):
                read_quantization(changed)


@pytest.mark.parametrize("value", [[], "gptq", 4, True, {}, {"quant_method": None}, {"quant_method": ["gptq"]}])
def test_what_is_no_description_is_refused(value: object) -> None:
    with pytest.raises(ModelLoadError, match="quantization_config"):
        read_quantization(value)


@pytest.mark.parametrize(
    ("ignored", "name", "covers"),
    [
        (("lm_head",), "lm_head", False),
        (("lm_head",), "model.layers.0.self_attn.q_proj", True),
        (("model.layers.1",), "model.layers.10.mlp.up_proj", True),
        (("model.layers.1",), "model.layers.1.mlp.up_proj", False),
        (("o_proj",), "model.layers.1.self_attn.o_proj", False),
        (("layers.1.self_attn",), "model.layers.1.self_attn.o_proj", False),
        (("layers.1",), "model.layers.11.self_attn.o_proj", True),
        (("gate",), "model.layers.1.mlp.gate_proj", True),
        (("re:.*down_proj",), "model.layers.1.mlp.down_proj", False),
        (("re:down_proj",), "model.layers.1.mlp.down_proj", True),
    ],
)
def test_ignored_modules_stay_as_they_are(ignored: tuple[str, ...], name: str, covers: bool) -> None:
    assert WeightFormat("int8", (1, 0), ignored=ignored).covers(name) is covers


@pytest.mark.parametrize(
    "targets",
    [
        ["model.layers.1.mlp.up_proj", "re:.*q_proj$"],
        # Flags of a whole pattern, and groups that are counted: each pattern stands alone.
        ["re:(?i).*SELF_ATTN.*", "re:(?x) .*up_proj # of the experts, too"],
        [r"re:model\.(layers)\.1", r"re:.*\.(mlp)\.(?!\1).*up_proj", r"re:(?P<a>model).*o_proj"],
        ["re:(?P<a>model).*q_proj|model.norm", "re:.*mlp"],
    ],
)
def test_targets_are_those_of_compressed_tensors(targets: list[str]) -> None:
    from compressed_tensors.utils.match import match_name

    config = copy.deepcopy(W4A16)
    config["config_groups"]["group_0"]["targets"] = targets
    form = read_quantization(config)
    assert form is not None
    modules = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    names = ["lm_head", *(f"model.layers.{layer}.{module}" for layer in (1, 11) for module in modules)]
    found = [name for name in names if form.covers(name)]
    assert found == [name for name in names if name != "lm_head" and any(match_name(name, each) for each in targets)]
    assert found


def test_a_target_that_is_no_pattern_is_named_as_it_stands() -> None:
    config = copy.deepcopy(W4A16)
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp", "re:a(?i)b"]
    with pytest.raises(ModelLoadError, match=r"targets holds 're:a\(\?i\)b', which is no regular expression"):
        read_quantization(config)


def test_the_flag_names_formats_and_is_refused_for_what_is_quantized_already() -> None:
    assert [weight_format.name for weight_format in FORMATS.values()] == list(FORMATS)
    assert chosen_format(None, "auto") is None
    assert chosen_format(None, "w8a8") == FORMATS["w8a8"]
    assert chosen_format(FORMATS["fp8"], "auto") == FORMATS["fp8"]
    with pytest.raises(
        ConfigError, match=r"--quantization int8: the checkpoint is quantized already \(int4-g128 \(awq\)\)"
    ):
        chosen_format(read_quantization(AWQ), "int8")


def test_the_head_is_quantized_on_request_beside_other_weights_only() -> None:
    form = chosen_format(None, "w8a8", "int8")
    assert form is not None
    assert (form.name, form.head) == ("w8a8, head int8", "int8")
    with pytest.raises(ConfigError, match="--quantization-head int8: the other weights are not quantized"):
        chosen_format(None, "auto", "int8")
    whole = WeightFormat("int8", (1, 0), layout="int-quantized")
    with pytest.raises(ConfigError, match=r"the checkpoint's head is quantized already \(int8 \(int-quantized\)\)"):
        chosen_format(whole, "auto", "int8")
    assert chosen_format(replace(whole, ignored=("lm_head",)), "auto", "int8") is not None


def test_the_embedding_is_quantized_on_request_with_a_head_that_is_tied_to_it() -> None:
    form = chosen_format(None, "w8a8", "none", "int8")
    assert form is not None
    assert (form.name, form.head, form.embedding) == ("w8a8, embedding int8", "", "int8")
    both = chosen_format(None, "int8", "int8", "int8", is_tied=True)
    assert both is not None
    assert both.name == "int8, head int8, embedding int8"
    with pytest.raises(ConfigError, match="--quantization-embedding int8: the other weights are not quantized"):
        chosen_format(None, "auto", "none", "int8")
    with pytest.raises(ConfigError, match="the head has the same weights; add --quantization-head int8"):
        chosen_format(None, "int8", "none", "int8", is_tied=True)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_scales_of_a_kv_cache_change_nothing_of_the_weights_and_may_stand_alone(strategy: str) -> None:
    scheme = {"kv_cache_scheme": KV | {"strategy": strategy}}
    assert read_quantization(W8A8 | scheme) == read_quantization(W8A8)
    alone = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": {}} | scheme
    assert read_quantization(alone) is None
