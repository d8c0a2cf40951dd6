"""Every kernel compiled ahead of time for sm_90 at the shapes of real models.

None spills, all fit, and tensor cores are used where they should be.

Needs Triton and its ptxas, no GPU. The compile-time arguments are those of the launchers' `config` functions.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from photon_grpc.kernels import accept, keep_rows, ngram, norm_add, rms_norm, swiglu
from photon_grpc.kernels.attention import online_softmax, triton_decode, triton_varlen, write_kv
from photon_grpc.kernels.lang.page_scales import PageScales
from photon_grpc.kernels.rotary import rotary, rotate_store
from photon_grpc.kernels.rotary.rotate_store import Rotation
from photon_grpc.kernels.sampling import (
    bitmask,
    histogram,
    logprobs,
    penalties,
    process_logits,
    sample,
    topk_topp,
)
from photon_grpc.kernels.sampling import sample_filtered as sample_filtered
from photon_grpc.kernels.sampling.histogram import Filters, LogitRows, Search
from photon_grpc.kernels.sampling.logprobs import LogprobMetadata, TileLogprobs
from photon_grpc.kernels.sampling.process_logits import LogitsProcessing
from photon_grpc.kernels.sampling.sample import SamplingMetadata, TileBest
from photon_grpc.kernels.slot_state import SlotState, StepRows

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

MAX_SHARED_BYTES = 227 * 1024
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
HALF = [torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Model:
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    block_size: int


MODELS = {
    "1B": Model(2048, 32, 8, 64, 8192, 16),
    "8B": Model(4096, 32, 8, 128, 14336, 64),
    "demo": Model(256, 4, 2, 64, 768, 16),
}
# Each model in the dtypes it is served in: the large ones fill a GPU, the embedded one is float32 on a CPU and a GPU.
CASES = [
    ("1B", torch.bfloat16),
    ("1B", torch.float16),
    ("1B", torch.float32),
    ("8B", torch.bfloat16),
    ("8B", torch.float32),
    ("demo", torch.float32),
]
each_model = pytest.mark.parametrize(("name", "dtype"), CASES)


@dataclass(frozen=True)
class Compiled:
    ir: str
    ptx: str
    shared_bytes: int
    spilled_bytes: int
    registers: int


def compiled(kernel: Any, types: dict[str, Any], constants: dict[str, Any]) -> Compiled:
    """Compile as the launcher would: pointers and sizes are multiples of 16.

    `constants` may hold num_warps and num_stages.

    A tuple's type is the tuple of its types, None where it has None.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: value for name, value in constants.items() if name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in constants.items() if name not in options}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    leaves = dict(leaves_of(tuple(signature.values())))
    constants |= {path: None for path, kind in leaves.items() if kind is None}
    signature = {name: typed(kind) for name, kind in signature.items()}
    divisible = [
        path for path, kind in leaves.items() if kind is not None and (kind[0] == "*" or kind in ("i32", "i64"))
    ]
    attributes = {path: [["tt.divisibility", 16]] for path in divisible}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spilled = ptxas_report(built.asm["ptx"])
    return Compiled(built.asm["ttgir"], built.asm["ptx"], built.metadata.shared, spilled, registers)


def leaves_of(kinds: tuple[Any, ...], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Return the types in nested tuples, each with its indices."""
    for i, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from leaves_of(kind, (*path, i))
        else:
            yield (*path, i), kind


def typed(kind: Any) -> Any:
    """Return a type as Triton has it, where None is a constant."""
    if isinstance(kind, tuple):
        parts = [typed(part) for part in kind]
        return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)
    return "constexpr" if kind is None else kind


def ptxas_report(ptx: str) -> tuple[int, int]:
    """Return registers a thread and bytes spilled."""
    report = kept_report(ptx)
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", report))
    return int(re.search(r"Used (\d+) registers", report)[1]), spilled


def kept_report(ptx: str) -> str:
    """Return the report of ptxas, cached beside Triton's kernels by the hash of its input."""
    from triton.runtime.cache import get_cache_manager

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    made_of = f"{triton.__version__} {ptx}"
    cache = get_cache_manager(hashlib.sha256(made_of.encode()).hexdigest())
    if kept := cache.get_file("ptxas.txt"):
        return Path(kept).read_text()
    command = [str(ptxas), "-v", "--gpu-name", "sm_90a", "-", "-o", os.devnull]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    cache.put(report, "ptxas.txt", binary=False)
    return report


def barriers(ptx: str) -> set[int]:
    """Return the offsets in shared memory of all mbarriers."""
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    places = re.findall(r"mbarrier\.init\S*\s+\[(%r\d+)\]", ptx)
    return {int(offsets.get(place, 0)) for place in places}


def stores(ptx: str) -> set[int]:
    """Return the offsets in shared memory that ordinary stores begin at."""
    return {int(offset) for offset in re.findall(r"(?:st\.shared|stmatrix)[^\[\n]*\[\w*%?\w*\+(\d+)\]", ptx)}


def check(built: Compiled, instruction: str = "", max_spilled_bytes: int = 0) -> None:
    assert built.spilled_bytes <= max_spilled_bytes
    assert built.shared_bytes <= MAX_SHARED_BYTES
    assert instruction in built.ptx
    # A barrier's memory may hold nothing else before it is invalidated, and the compiler gives away what is not used.
    assert not barriers(built.ptx) & stores(built.ptx)


@each_model
def test_rms_norm(name: str, dtype: torch.dtype) -> None:
    model, pointer = MODELS[name], "*" + NAMES[dtype]
    types = dict.fromkeys(["x", "residual", "weight", "y", "total"], pointer)
    types |= dict.fromkeys(["num_rows", "x_stride_token", "x_stride_head", "x_stride", "residual_stride"], "i32")
    types["eps"] = "fp32"
    check(compiled(rms_norm.rms_norm_kernel, types, {"HEADS": 1, "PDL": True} | rms_norm.config(model.hidden)))
    check(
        compiled(
            rms_norm.rms_norm_kernel, types, {"HEADS": model.q_heads, "PDL": False} | rms_norm.config(model.head_dim)
        )
    )
    check(compiled(rms_norm.add_rms_norm_kernel, types, rms_norm.config(model.hidden)))
    types["weight"] = "*fp32"
    check(compiled(rms_norm.add_rms_norm_kernel, types, rms_norm.config(model.hidden, once=True)))


@each_model
def test_rotary(name: str, dtype: torch.dtype) -> None:
    model, pointer = MODELS[name], "*" + NAMES[dtype]
    types = {"q": pointer, "k": pointer, "cos": "*fp32", "sin": "*fp32", "positions": "*i64"}
    types |= {"q_stride": "i32", "k_stride": "i32"}
    check(compiled(rotary.rotary_kernel, types, rotary.config(model.q_heads, model.kv_heads, model.head_dim)))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@each_model
def test_swiglu_and_geglu(name: str, dtype: torch.dtype, activation: swiglu.Activation) -> None:
    types = {"gate_up": "*" + NAMES[dtype], "y": "*" + NAMES[dtype], "stride": "i32"}
    built = compiled(swiglu.swiglu_kernel, types, swiglu.config(MODELS[name].intermediate, activation))
    check(built)
    assert "ld.global.v" in built.ptx


@pytest.mark.parametrize("slices", [1, 2])
@each_model
def test_norm_add(name: str, dtype: torch.dtype, slices: int) -> None:
    kind = "*" + NAMES[dtype]
    types = {"y": kind if slices == 1 else "*fp32", "weight": "*fp32", "h": kind, "partial": "*fp32"}
    config = norm_add.config(MODELS[name].hidden, slices, rounds=dtype == torch.bfloat16)
    built = compiled(
        norm_add.norm_add_kernel, types | {"slice_stride": "i32", "eps": "fp32"}, config | {"bias": None, "PDL": True}
    )
    check(built, "griddepcontrol.wait")
    assert "ld.global.v" in built.ptx


@pytest.mark.parametrize("adds", [False, True])
@each_model
def test_keep_rows(name: str, dtype: torch.dtype, adds: bool) -> None:
    kind, hidden = "*" + NAMES[dtype], MODELS[name].hidden
    types = {"tensors": (kind, kind if adds else None, kind), "strides": ("i32", "i32", "i32")}
    constants = {"HIDDEN": hidden, "SPAN": keep_rows.SPAN, "PDL": True, "num_warps": 4}
    built = compiled(keep_rows.keep_rows_kernel, types, constants)
    check(built, "griddepcontrol.wait")
    assert "ld.global.v" in built.ptx


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("num_tokens", [1, 8192])
@each_model
def test_norm_swiglu(name: str, dtype: torch.dtype, num_tokens: int, activation: swiglu.Activation) -> None:
    types = dict.fromkeys(["gate_up", "h", "y"], "*" + NAMES[dtype]) | {"stride": "i32", "eps": "fp32"}
    config = swiglu.norm_config(num_tokens, MODELS[name].intermediate, MODELS[name].hidden, activation)
    built = compiled(swiglu.norm_swiglu_kernel, types, config | {"bias": None, "PDL": True})
    check(built, "griddepcontrol.wait")
    assert "ld.global.v" in built.ptx


#: Models with pages of their own type, and some with pages of 8 bits.
each_cache = pytest.mark.parametrize(
    ("name", "dtype", "in_8_bits"),
    [*((*case, False) for case in CASES), ("8B", torch.bfloat16, True), ("demo", torch.float32, True)],
)
SCALES = PageScales("*fp32", "*fp32", "*i64", "*fp32")  # type: ignore[arg-type]


def page_types(dtype: torch.dtype, in_8_bits: bool) -> dict[str, Any]:
    return {"pages": "*fp8e4nv", "scales": SCALES} if in_8_bits else {"pages": "*" + NAMES[dtype]}


def unscaled(in_8_bits: bool) -> dict[str, None]:
    return {} if in_8_bits else {"scales": None}


@pytest.mark.parametrize("of_heads", [False, True])
@each_cache
def test_rotate_store(name: str, dtype: torch.dtype, in_8_bits: bool, of_heads: bool) -> None:
    model, pointer = MODELS[name], "*" + NAMES[dtype]
    types: dict[str, Any] = dict.fromkeys(["qkv", "h", "bias", "q"], pointer) | page_types(dtype, in_8_bits)
    types |= {"rotation": Rotation("*fp32", "*fp32", "*i64", "*i64"), "block_stride": "i32", "eps": "fp32"}
    types |= {"partial": "*fp32", "slice_stride": "i32"}
    types["norms"] = (pointer, pointer) if of_heads else (None, None)
    config = rotate_store.config(model.hidden, model.q_heads, model.kv_heads, model.head_dim, model.block_size)
    # With bias from slices in float32 and the sums of a tile, without from the library.
    unused = unscaled(in_8_bits) | ({} if of_heads else {"bias": None, "partial": None})
    built = compiled(rotate_store.rotate_store_kernel, types, config | unused | {"PDL": True})
    check(built, "griddepcontrol.wait")
    assert "st.global.v" in built.ptx or name == "demo"
    assert "cvt.rn.satfinite.e4m3x2" in built.ptx or not in_8_bits


def test_rotate_store_of_a_part_of_each_head() -> None:
    types: dict[str, Any] = dict.fromkeys(["qkv", "h", "q", "pages"], "*bf16")
    types |= {"rotation": Rotation("*fp32", "*fp32", "*i64", "*i64"), "block_stride": "i32", "eps": "fp32"}
    types |= {"partial": "*fp32", "slice_stride": "i32", "norms": (None, None)}
    config = rotate_store.config(3072, 24, 8, 128, 64, rounds=True, rotated=48)
    unused = {"bias": None, "scales": None, "PDL": True}
    check(compiled(rotate_store.rotate_store_kernel, types, config | unused), "griddepcontrol.wait")


@pytest.mark.parametrize("num_columns", [32000, 128256, 151936])
def test_sample_filtered(num_columns: int) -> None:
    types: dict[str, Any] = {
        "rows": LogitRows("*fp32", "i32", "i32"),  # type: ignore[arg-type]
        "metadata": SamplingMetadata("*i64", "*i32", "*fp32", "*i64", "*i64", "*i64"),  # type: ignore[arg-type]
        "filters": Filters("*i64", "*fp32", "*fp32"),  # type: ignore[arg-type]
        "search": Search(*["*fp32"] * 4, "*i64", "*i32", "*i32", *["*fp32"] * 4, "*i32", "i32"),  # type: ignore[arg-type]
    }
    for kernel, constants in topk_topp.stages(num_columns):
        built = compiled(kernel, types, constants)
        reads_chunk = kernel in (histogram.tally_kernel, histogram.list_kernel)
        check(built, "ld.global.v4" if reads_chunk else "ld.global")
    built = compiled(sample_filtered.sample_filtered_kernel, types, sample_filtered.config())
    check(built)
    # An approximate logarithm has an absolute error that would swallow log(u) where u is near 1.
    assert "lg2.approx" not in built.ptx


@each_cache
def test_write_kv(name: str, dtype: torch.dtype, in_8_bits: bool) -> None:
    model, pointer = MODELS[name], "*" + NAMES[dtype]
    types = dict.fromkeys(["k", "v"], pointer) | {"slot_mapping": "*i64"} | page_types(dtype, in_8_bits)
    types |= dict.fromkeys(["k_stride", "v_stride", "block_stride"], "i32")
    config = write_kv.config(model.kv_heads, model.head_dim, model.block_size)
    built = compiled(write_kv.write_kv_kernel, types, config | unscaled(in_8_bits))
    check(built)
    assert "st.global.v" in built.ptx or in_8_bits


def attention_types(dtype: torch.dtype, in_8_bits: bool = False) -> dict[str, Any]:
    types: dict[str, Any] = dict.fromkeys(["q", "out"], "*" + NAMES[dtype]) | page_types(dtype, in_8_bits)
    types |= {"rows": ("*i32", "*i32", "*i32"), "partials": ("*fp32", "*fp32", "*fp32")}
    types |= dict.fromkeys(["query_start", "context_len"], "*i32")
    types |= dict.fromkeys(["q_stride", "block_stride", "table_stride", "num_rows"], "i32")
    return types | {"scale": "fp32"}


def one_page(model: Model, dtype: torch.dtype, block_size: int) -> torch.Tensor:
    return torch.empty(1, 1, 2, model.kv_heads, block_size, model.head_dim, dtype=dtype)


@pytest.mark.parametrize(("block_size", "window"), [(8, 0), (16, 0), (64, 0), (16, 1024)])
@pytest.mark.parametrize("splits", [1, 4])
@each_cache
def test_decode_attention(
    name: str, dtype: torch.dtype, in_8_bits: bool, splits: int, block_size: int, window: int
) -> None:
    model = MODELS[name]
    pages = one_page(model, dtype, block_size)
    shape = online_softmax.shape(model.q_heads, pages, window, dtype)
    constants = {"SHAPE": shape, "TILE": triton_decode.tile(shape.GROUP, splits), **triton_decode.options(pages, dtype)}
    unused = unscaled(in_8_bits) | ({"partials": None} if splits == 1 else {})
    built = compiled(triton_decode.decode_kernel, attention_types(dtype, in_8_bits), constants | unused)
    check(built, "mma.sync" if dtype in HALF else "fma.rn.f32")
    # Keys come through shared memory, 16 bytes a thread, several tiles ahead.
    assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", built.ptx) or in_8_bits


@pytest.mark.parametrize(("block_size", "window"), [(8, 0), (16, 0), (64, 0), (16, 1024)])
@each_cache
def test_varlen_attention(name: str, dtype: torch.dtype, in_8_bits: bool, block_size: int, window: int) -> None:
    model = MODELS[name]
    pages = one_page(model, dtype, block_size)
    shape = online_softmax.shape(model.q_heads, pages, window, dtype)
    constants = {"SHAPE": shape, "TILE": triton_varlen.tile(shape.GROUP, dtype), **triton_varlen.options(pages, dtype)}
    types = attention_types(dtype, in_8_bits)
    built = compiled(triton_varlen.varlen_kernel, types, constants | unscaled(in_8_bits))
    check(built, "wgmma.mma_async" if dtype in HALF else "fma.rn.f32")


@pytest.mark.parametrize("window", [0, 1024])
@each_cache
def test_merge(name: str, dtype: torch.dtype, in_8_bits: bool, window: int) -> None:
    model = MODELS[name]
    shape = online_softmax.shape(model.q_heads, one_page(model, dtype, 16), window, dtype)
    constants = {"SHAPE": shape, "num_warps": 1} | unscaled(in_8_bits)
    check(compiled(triton_decode.merge_kernel, attention_types(dtype, in_8_bits), constants))


PROCESSING = LogitsProcessing(
    penalties.Penalties("*i16", *["*fp32"] * 3, "*i64", "*i32", "*fp32"),  # type: ignore[arg-type]
    bitmask.Constraints("*i64", "*i32", "*i64", "*i32", "*i64", "*i32"),  # type: ignore[arg-type]
)
STATE = SlotState("*i32", "*i64", "*i32", "*i64")  # type: ignore[arg-type]
SAMPLING = SamplingMetadata("*i64", "*i32", "*fp32", "*i64", "*i64", "*i64")  # type: ignore[arg-type]


#: Where positions may stand behind drafts.
DRAFTED = PROCESSING._replace(drafted=penalties.Drafted("*i64", "*i32", "i32"))  # type: ignore[arg-type]


@pytest.mark.parametrize("processing", [PROCESSING, DRAFTED], ids=["plain", "drafted"])
def test_shape(processing: LogitsProcessing) -> None:
    types: dict[str, Any] = {"logits": "*fp32", "slots": "*i64", "context_len": "*i32", "processing": processing}
    types |= {"is_constrained": "*i1", "num_columns": "i32", "stride": "i32"}
    check(compiled(process_logits.process_kernel, types, process_logits.config() | {"PDL": True}), "ld.global.v4")


@pytest.mark.parametrize("processing", [None, PROCESSING, DRAFTED], ids=["plain", "shaped", "drafted"])
def test_sample(processing: LogitsProcessing | None) -> None:
    best = TileBest("*fp32", "*fp32", "*i32", None if processing is None else "*i1")  # type: ignore[arg-type]
    types: dict[str, Any] = {"logits": "*fp32", "metadata": SAMPLING, "processing": processing, "best_of": best}
    types |= dict.fromkeys(("num_columns", "stride", "num_tiles", "first"), "i32")
    constants = {"PDL": True} | ({"processing": None} if processing is None else {})
    built = compiled(sample.sample_kernel, types, sample.config() | constants)
    check(built, "ld.global.v4")
    assert "ld.global" not in built.ptx.split("griddepcontrol.wait", 1)[0]
    assert "lg2.approx" not in built.ptx
    merging = {"best_of": best, "out": "*i64", "num_tiles": "i32"}
    check(compiled(sample.sample_merge_kernel, merging, {"TILES_PAD": 64, "num_warps": 1, "PDL": True}))


def test_counts() -> None:
    counting = {"slots": "*i64", "yields": "*i64", "ids": "*i64", "counts": "*i16", "num_columns": "i32"}
    check(compiled(penalties.count_kernel, counting, {"num_warps": 1, "PDL": True}))


@pytest.mark.parametrize("held", [None, "*i16"])
@pytest.mark.parametrize("rows", [1, 64, 512])
def test_accept(rows: int, held: str | None) -> None:
    types: dict[str, Any] = {"rows": StepRows("*i64", "*i64", "*i64"), "ids": "*i64", "state": STATE}  # type: ignore[arg-type]
    types |= {"held": held, "lengths": "*i64", "token_stride": "i32", "num_columns": "i32"}
    constants = {"ROWS_PAD": rows, "DRAFTS_PAD": accept.MAX_DRAFTS, "PDL": True, "num_warps": 1}
    built = compiled(accept.accept_kernel, types, constants | ({} if held else {"held": None}))
    check(built)
    assert "ld.global" not in built.ptx.split("griddepcontrol.wait", 1)[0]


def test_ngram() -> None:
    types: dict[str, Any] = {"slots": "*i64", "num_drafts": "*i64", "state": STATE, "token_stride": "i32"}
    check(compiled(ngram.ngram_kernel, types, {"DRAFTS_PAD": 8, "BLOCK": 1024, "num_warps": 4}))


@pytest.mark.parametrize("num_columns", [32000, 128256, 262144])
def test_logprobs(num_columns: int) -> None:
    types: dict[str, Any] = {"logits": "*fp32", "ids": "*i64", "records": "*i32"}
    types |= {"metadata": LogprobMetadata("*i64", "*i64", "*i64", "*i32")}  # type: ignore[arg-type]
    types |= {"tiles": TileLogprobs(*["*fp32"] * 3, *["*i32"] * 5)}  # type: ignore[arg-type]
    types |= dict.fromkeys(("num_columns", "stride", "num_tiles", "first"), "i32")
    check(compiled(logprobs.logprob_peak_kernel, types, logprobs.config()), "ld.global.v4")
    check(compiled(logprobs.logprob_merge_kernel, types, logprobs.merge_config(num_columns)))
    check(compiled(logprobs.logprob_best_kernel, types, logprobs.config() | logprobs.LIMITS), "ld.global.v4")
    check(compiled(logprobs.logprob_record_kernel, types, logprobs.record_config(num_columns)))
