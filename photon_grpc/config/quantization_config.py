"""`quantization_config` of config.json: the dialects of GPTQ, AWQ, compressed-tensors and FP8 as a WeightFormat.

Everything that would change the weights and is not supported is refused by its key. Keys that only say how the weights
were found (calibration data, damping, observers) have no meaning here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from photon_grpc.config.json_file import refusal, shown
from photon_grpc.config.left_out import FILE, KEY, checked_pattern, left_out, outside, refused, targeted
from photon_grpc.config.quantization import ALL, BLOCK, PER_ROW, PER_TENSOR, Kind, WeightFormat, groups

GROUP_SIZES = (32, 64, 128)

#: Of compressed-tensors, for weights.
_STRATEGIES: dict[Kind, tuple[str, ...]] = {
    "fp8": ("tensor", "channel", "block"),
    "int8": ("channel", "group", "tensor"),
    "int4": ("channel", "group"),
}
_BLOCKS = {"channel": PER_ROW, "tensor": PER_TENSOR, "block": (BLOCK, BLOCK)}

Names = Annotated[tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(max_length=4096)]
Bits = Annotated[int, Meta(ge=1, le=64)]
GroupSize = Annotated[int, Meta(ge=-1, le=2**20)]


class GptqJson(Struct, kw_only=True):
    """The keys of `quant_method: gptq` that decide the weights."""

    bits: Bits
    group_size: GroupSize
    desc_act: bool = False
    sym: bool = True
    #: Two spellings of one key.
    checkpoint_format: str | None = None
    format: str | None = None
    is_marlin_format: bool = False
    #: The integers that values are packed into.
    pack_dtype: str = "int32"
    block_name_to_quantize: str | None = None
    modules_in_block_to_quantize: Any = None
    #: Settings of GPTQModel: rules for some modules, a LoRA beside the weights, a rotation of them.
    dynamic: Any = None
    adapter: Any = None
    rotation: Any = None
    modules_to_not_convert: Names | None = None
    lm_head: bool = False


class AwqJson(Struct, kw_only=True):
    """The keys of `quant_method: awq` that decide the weights."""

    #: Three keys with two spellings each: of transformers and of AutoAWQ.
    bits: Bits | None = None
    w_bit: Bits | None = None
    group_size: GroupSize | None = None
    q_group_size: GroupSize | None = None
    version: str | None = None
    format: str | None = None
    zero_point: bool = True
    backend: str | None = None
    modules_to_not_convert: Names | None = None


class Fp8Json(Struct, kw_only=True):
    """The keys of `quant_method: fp8`."""

    activation_scheme: str = "dynamic"
    weight_block_size: Annotated[tuple[int, ...], Meta(max_length=8)] | None = None
    fmt: str = "e4m3"
    scale_fmt: str = "float"
    modules_to_not_convert: Names | None = None
    ignored_layers: Names | None = None
    modules_to_convert: Names | None = None


class QuantizationArgs(Struct, kw_only=True):
    """The form in which compressed-tensors quantizes weights or activations."""

    num_bits: Bits
    type: Literal["int", "float"]
    symmetric: bool = True
    strategy: str | None = None
    group_size: GroupSize | None = None
    block_structure: Annotated[tuple[int, ...], Meta(max_length=8)] | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None
    scale_dtype: str | None = None


class Scheme(Struct, kw_only=True):
    """One of `config_groups`."""

    targets: Names
    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    output_activations: QuantizationArgs | None = None
    format: str | None = None


class CompressedJson(Struct, kw_only=True):
    """The keys of `quant_method: compressed-tensors`."""

    #: Each is a Scheme.
    config_groups: Annotated[dict[str, Any], Meta(max_length=64)]
    format: str = "dense"
    quantization_status: str = "compressed"
    ignore: Names | None = None
    kv_cache_scheme: Any = None
    sparsity_config: Any = None
    moe_sparsity_config: Any = None
    transform_config: Any = None


def read_quantization(value: Any) -> WeightFormat | None:
    """Return the format that `quantization_config` of config.json describes; None if there is none.

    Raise ModelLoadError naming the key for what is not supported, malformed or contradictory.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refusal(FILE, KEY, f"must be an object, is {shown(value)}")
    method = value.get("quant_method")
    read = _READERS.get(method) if isinstance(method, str) else None
    if read is None:
        supported = f"supported: {', '.join(_READERS)}"
        if method is None:
            raise refused("quant_method", f"is missing; {supported}")
        remedy = f"; {_REMEDIES[str(method)]}" if str(method) in _REMEDIES else ""
        raise refused("quant_method", f"is {shown(method)}, which is not supported; {supported}{remedy}")
    found = read(value)
    for pattern in () if found is None else found.ignored:
        checked_pattern("ignore", pattern)
    return found


def _gptq(value: dict[str, Any]) -> WeightFormat:
    keys = _struct(value, GptqJson)
    layout = _agreed(keys, "checkpoint_format", "format", "gptq")
    if keys.is_marlin_format:
        raise refused("is_marlin_format", "is true; supported: false. Use the GPTQ source of the checkpoint")
    if layout not in ("gptq", "gptq_v2"):
        problem = f"is {shown(layout)}; supported: gptq, gptq_v2. Of a repacked checkpoint (marlin) use the GPTQ source"
        raise refused("checkpoint_format", problem)
    _only("bits", keys.bits, (4, 8))
    _only("pack_dtype", keys.pack_dtype.removeprefix("torch."), ("int32",))
    _only("block_name_to_quantize", keys.block_name_to_quantize, (None, "model.layers"))
    if keys.desc_act:
        problem = "is true: columns in the order of their activations are not supported; quantize with desc_act false"
        raise refused("desc_act", problem)
    if keys.bits == 8 and not keys.sym:
        raise refused("sym", "is false: zero points are supported with 4 bits only")
    for name in ("adapter", "rotation"):
        if getattr(keys, name):
            raise refused(name, "is set, which is not supported: all modules must have one format")
    ignored = (*(keys.modules_to_not_convert or ()), *(() if keys.lm_head else ("lm_head",)))
    ignored += left_out(keys.dynamic) + outside(keys.modules_in_block_to_quantize, has_head=keys.lm_head)
    # Symmetric checkpoints store zero points, too; they are checked when they are read.
    return WeightFormat(_int(keys.bits), _group(keys.group_size), 16, not keys.sym, layout, ignored)


def _awq(value: dict[str, Any]) -> WeightFormat:
    keys = _struct(value, AwqJson)
    _only("w_bit" if keys.bits is None else "bits", _agreed(keys, "bits", "w_bit", 4), (4,))
    _only("format" if keys.version is None else "version", _agreed(keys, "version", "format", "gemm"), ("gemm",))
    if keys.backend == "llm-awq":
        raise refused("backend", "is 'llm-awq', another order of values; supported: version gemm of AutoAWQ")
    if not keys.zero_point:
        raise refused("zero_point", "is false; supported: true")
    ignored = (*(keys.modules_to_not_convert or ()), "lm_head")
    size_key = "q_group_size" if keys.group_size is None else "group_size"
    size = _group(_agreed(keys, "group_size", "q_group_size", 128), size_key)
    return WeightFormat("int4", size, 16, True, "awq", ignored)


def _fp8(value: dict[str, Any]) -> WeightFormat:
    keys = _struct(value, Fp8Json)
    _only("activation_scheme", keys.activation_scheme, ("dynamic",))
    _only("fmt", keys.fmt, ("e4m3", "float8_e4m3fn"))
    _only("scale_fmt", keys.scale_fmt, ("float",))
    if keys.modules_to_convert:
        raise refused("modules_to_convert", "is set: only linear layers are read in FP8")
    size, supported = keys.weight_block_size, f"supported: [{BLOCK}, {BLOCK}], and null for one scale a tensor"
    # Tools differ in what a missing key means: transformers reads blocks, AutoFP8 wrote one scale a tensor.
    if "weight_block_size" not in value:
        raise refused("weight_block_size", f"is missing; {supported}")
    if size not in (None, (BLOCK, BLOCK)):
        raise refused("weight_block_size", f"is {list(size)}; {supported}")
    ignored = (*(keys.modules_to_not_convert or ()), *(keys.ignored_layers or ()), "lm_head")
    return WeightFormat("fp8", (BLOCK, BLOCK) if size else PER_TENSOR, 8, False, "fp8", ignored)


def _compressed_tensors(value: dict[str, Any]) -> WeightFormat | None:
    """Return None for weights that are not quantized, beside scales for the KV cache."""
    keys = _struct(value, CompressedJson)
    _only("quantization_status", keys.quantization_status, ("compressed",))
    _check_kv_cache(keys.kv_cache_scheme)
    if not keys.config_groups and keys.kv_cache_scheme:
        return None
    for name in ("sparsity_config", "moe_sparsity_config", "transform_config"):
        if getattr(keys, name) not in (None, {}) and not (
            name == "sparsity_config" and _is_dense(keys.sparsity_config)
        ):
            raise refused(name, "is set, which is not supported; supported: null")
    if len(keys.config_groups) != 1:
        problem = f"has {len(keys.config_groups)} groups; one format for all linear layers is supported"
        raise refused("config_groups", problem)
    name, group = next(iter(keys.config_groups.items()))
    at = f"config_groups.{name}"
    scheme = _struct(group, Scheme, at)
    targets = targeted(scheme.targets, f"{at}.targets")
    if scheme.weights is None:
        raise refused(f"{at}.weights", "is missing")
    if scheme.output_activations is not None:
        raise refused(f"{at}.output_activations", "is set, which is not supported")
    layout = scheme.format or keys.format
    kind, block = _weights(scheme.weights, f"{at}.weights")
    activation_bits = _activations(scheme.input_activations, kind, block, f"{at}.input_activations")
    _check_layout(layout, kind, activation_bits)
    layout = "float-quantized" if kind == "fp8" else "pack-quantized" if layout == "pack-quantized" else "int-quantized"
    has_zeros = not scheme.weights.symmetric
    if has_zeros and kind != "int4":
        raise refused(f"{at}.weights.symmetric", "is false: zero points are supported with 4 bits only")
    ignored = keys.ignore or ()
    return WeightFormat(kind, block, activation_bits, has_zeros, layout, ignored, targets=targets)  # type: ignore[arg-type]


def _check_kv_cache(scheme: Any) -> None:
    """Raise ModelLoadError unless the scales of the KV cache, if any, are such as `--kv-cache-dtype fp8` takes."""
    if scheme in (None, {}):
        return
    at = "kv_cache_scheme"
    args = _struct(scheme, QuantizationArgs, at)
    _only(f"{at}.type", args.type, ("float",))
    _only(f"{at}.num_bits", args.num_bits, (8,))
    for key, value, wanted in (("symmetric", args.symmetric, True), ("dynamic", args.dynamic, False)):
        if value is not wanted:
            raise refused(f"{at}.{key}", f"is {shown(value)}; supported: {str(wanted).lower()}")
    _only(f"{at}.strategy", args.strategy, (None, "tensor", "attn_head"))


def _weights(args: QuantizationArgs, at: str) -> tuple[Kind, tuple[int, int]]:
    if args.dynamic is not False:
        raise refused(f"{at}.dynamic", f"is {shown(args.dynamic)}: weights have scales of their own")
    if args.actorder is not False:
        _only(f"{at}.actorder", args.actorder, (None, "static", "weight"))
    scale_dtype = args.scale_dtype and args.scale_dtype.removeprefix("torch.")
    _only(f"{at}.scale_dtype", scale_dtype, (None, "float32", "bfloat16", "float16"))
    if args.type == "float":
        _only(f"{at}.num_bits", args.num_bits, (8,))
        kind: Kind = "fp8"
    else:
        _only(f"{at}.num_bits", args.num_bits, (4, 8))
        kind = _int(args.num_bits)
    inferred = {None: "tensor", -1: "channel"}.get(args.group_size, "group")
    strategy = inferred if args.strategy is None else args.strategy
    _only(f"{at}.strategy", strategy, _STRATEGIES[kind])
    _check_sizes(args, strategy, at)
    return kind, groups(args.group_size or 0) if strategy == "group" else _BLOCKS[strategy]


def _check_sizes(args: QuantizationArgs, strategy: str, at: str) -> None:
    """Refuse sizes that the strategy has no use for: one of the two is wrong."""
    whole_row = (None, -1) if strategy == "channel" else (None,)
    _only(f"{at}.group_size", args.group_size, GROUP_SIZES if strategy == "group" else whole_row)
    structure = args.block_structure and list(args.block_structure)
    _only(f"{at}.block_structure", structure, ([BLOCK, BLOCK],) if strategy == "block" else (None,))


def _activations(args: QuantizationArgs | None, kind: Kind, block: tuple[int, int], at: str) -> int:
    """Return the bits of the activations."""
    if args is None:
        if kind == "fp8":
            raise refused(at, "is missing: FP8 weights are multiplied with FP8 activations")
        return 16
    _only(f"{at}.num_bits", args.num_bits, (8,))
    _only(f"{at}.type", args.type, ("float" if kind == "fp8" else "int",))
    if args.dynamic is not True:
        raise refused(f"{at}.dynamic", f"is {shown(args.dynamic)}; supported: true (scales found while running)")
    if args.actorder not in (None, False):
        raise refused(f"{at}.actorder", f"is {shown(args.actorder)}; supported: null")
    if not args.symmetric:
        raise refused(f"{at}.symmetric", "is false; supported: true")
    has_blocks = block[0] > 1
    strategy = "group" if has_blocks else "token"
    _only(f"{at}.strategy", args.strategy, (strategy,))
    _check_sizes(args, strategy, at)
    if has_blocks:
        _only(f"{at}.group_size", args.group_size, (BLOCK,))
    if kind == "int4" or (kind == "int8" and block[1] != ALL):
        raise refused(at, "is set: 8-bit activations are supported with a scale a row of 8-bit weights")
    return 8


def _check_layout(layout: str, kind: Kind, activation_bits: int) -> None:
    allowed = ["float-quantized"] if kind == "fp8" else ["pack-quantized"] if kind == "int4" else []
    if kind == "int8":
        allowed = ["int-quantized"] if activation_bits == 8 else ["pack-quantized", "int-quantized"]
    if kind != "int4":
        allowed.append("naive-quantized")
    _only("format", layout, tuple(allowed))


def _is_dense(value: Any) -> bool:
    """Return whether a sparsity_config says that nothing is sparse."""
    return isinstance(value, dict) and value.get("format") == "dense"


def _int(bits: int) -> Kind:
    return "int4" if bits == 4 else "int8"


def _group(size: int, key: str = "group_size") -> tuple[int, int]:
    """Return the block of groups of `size` columns; -1 is a whole row."""
    if size == -1:
        return PER_ROW
    _only(key, size, GROUP_SIZES)
    return groups(size)


def _only(key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        names = ", ".join("null" if item is None else str(item) for item in allowed)
        raise refused(key, f"is {shown(str(value) if isinstance(value, list) else value)}; supported: {names}")


def _agreed(keys: Any, name: str, other: str, default: Any) -> Any:
    """Return the value, in lower case, of a key with two spellings; refuse two values that differ."""
    one, two = (
        value.lower() if isinstance(value, str) else value for value in (getattr(keys, name), getattr(keys, other))
    )
    if None not in (one, two) and one != two:
        raise refused(name, f"is {shown(one)} and {other}, the same setting, is {shown(two)}; they must agree")
    return next((value for value in (one, two) if value is not None), default)


def _struct(value: Any, kind: type[Any], at: str = "") -> Any:
    """Convert; null counts as absent. `at` is the path of the value."""
    if not isinstance(value, dict):
        raise refused(at, f"must be an object, is {shown(value)}")
    present = {key: item for key, item in value.items() if item is not None}
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).replace("`", "").partition(" - at $.")
        missing = re.fullmatch("Object missing required field (.+)", problem)
        parts = (at, path, missing[1] if missing else "")
        key = ".".join(part for part in parts if part)
        raise refused(key, "is missing" if missing else f"is malformed: {problem}") from None


_READERS: dict[str, Callable[[dict[str, Any]], WeightFormat | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
}
_SOURCE = "use the checkpoint that it was made from, or --quantization on the 16-bit one"
_REMEDIES = {
    "marlin": "use the GPTQ checkpoint that it was made from",
    "gptq_marlin": "use the GPTQ checkpoint that it was made from",
    "bitsandbytes": "load the 16-bit checkpoint with --quantization int8 or int4-g128",
    **dict.fromkeys(("aqlm", "quip", "hqq", "eetq", "quanto", "torchao", "mxfp4", "higgs", "spqr", "vptq"), _SOURCE),
}
