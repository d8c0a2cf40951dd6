"""The Gluon kernels of a fused layer compiled ahead of time for sm_90: every tile of the table, no spills, fits, the units meant.

Needs Triton and its ptxas, no GPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from photon_grpc.kernels import embed
from photon_grpc.kernels.attention import decode_attention
from photon_grpc.kernels.attention.decode_tile import decode_attention_kernel
from photon_grpc.kernels.linear import tiles
from photon_grpc.kernels.linear.gemv import gemv_kernel
from photon_grpc.kernels.linear.projection import DRAWING, PAGED
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.linear.wgmma import wgmma_kernel
from tests.kernels.test_compile import MODELS, Compiled, check, compiled, one_page, ptxas_report

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

POINTERS = dict.fromkeys(["w", "bias", "x", "y", "pages", "q", "out"], "*bf16")
POINTERS |= dict.fromkeys(["cos", "sin", "partial", "partial_weight", "temperature", "tops"], "*fp32")
POINTERS |= dict.fromkeys(["positions", "slot_mapping", "slots", "seed", "output_index", "num_prompt"], "*i64")
POINTERS |= dict.fromkeys(["counters", "query_start", "context_len", "block_tables", "ids"], "*i32")
SCALARS = {"num_rows": "i32", "eps": "fp32", "scale": "fp32", "block_stride": "i32", "table_stride": "i32"}
SCALARS |= {"q_stride": "i32"}


def compiled_gluon(kernel: Any, constants: dict[str, Any], num_warps: int, arch: int = 90, **types_of: str) -> Compiled:
    """Compile as the launcher would: pointers and strides are multiples of 16, the number of rows is anything."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    types = POINTERS | SCALARS | types_of
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name.endswith("stride")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})
    registers, spilled = ptxas_report(built.asm["ptx"])
    return Compiled(built.asm["ptx"], built.metadata.shared, spilled, registers)


def projection(epilogue: str, tile: Tile, rows: int, arch: int = 90, **constants: Any) -> Compiled:
    constants |= {"EPILOGUE": epilogue, "BM": rows, "BN": tile.BN, "BK": tile.BK, "KW": tile.KW, "NS": tile.NS}
    of_head = epilogue in ("draw", "logits")
    constants |= {
        "bias": None,
        "NORM": epilogue in ("rotary", "swiglu"),
        "PDL": arch >= 90,
        "BLOCK_SIZE": 64,
        "GUARD": of_head,
    }
    unused = dict.fromkeys((*PAGED, *DRAWING)) | {"Q_HEADS": 0, "KV_HEADS": 0}
    for name in {"rotary": PAGED, "draw": DRAWING}.get(epilogue, ()):
        del unused[name]
    constants = unused | constants
    types = {"y": "*fp32"} if of_head else {}
    if tile.kind == "gemv":
        return compiled_gluon(gemv_kernel, constants, tile.KW, arch, **types)
    constants |= {"SPLITS": tile.SPLITS} | ({} if tile.SPLITS > 1 else {"partial": None, "counters": None})
    return compiled_gluon(wgmma_kernel, constants, tile.KW, arch, **types)


@pytest.mark.parametrize("rows", tiles.BUCKETS)
@pytest.mark.parametrize("name", ["1B", "8B"])
def test_projections_of_the_table(name: str, rows: int) -> None:
    model = MODELS[name]
    heads = {"Q_HEADS": model.q_heads, "KV_HEADS": model.kv_heads}
    shapes = [
        ("rotary", (model.q_heads + 2 * model.kv_heads) * model.head_dim, model.hidden, model.head_dim // 2, heads),
        ("add", model.hidden, model.q_heads * model.head_dim, 0, {}),
        ("swiglu", 2 * model.intermediate, model.hidden, model.intermediate, {}),
        ("add", model.hidden, model.intermediate, 0, {}),
    ]
    for epilogue, n, k, span, more in shapes:
        tile = tiles.choose(n, k, rows, span)
        assert tile == tiles.TABLE[n, k][rows]
        if tile is None:
            continue
        built = projection(epilogue, tile, rows, N=n, K=k, SPAN=span, **more)
        check(built, "wgmma.mma_async" if tile.kind == "wgmma" else "mma.sync")
        before_wait, behind = built.ptx.split("griddepcontrol.wait", 1)
        # Weights are on their way before the wait, and where there are enough of them eight neighbours are stored together.
        assert "cp.async.c" in before_wait
        assert "griddepcontrol.launch_dependents" in behind
        assert "st.global.v4" in behind or rows < 64


@pytest.mark.parametrize(("arch", "shared_bytes"), [(80, 166_912), (89, 101_376)])
@pytest.mark.parametrize("rows", [bucket for bucket in tiles.BUCKETS if bucket <= tiles.MAX_DEFAULT_ROWS])
def test_defaults_have_room_on_devices_with_less_shared_memory(rows: int, arch: int, shared_bytes: int) -> None:
    model = MODELS["1B"]
    limit = tiles.ring_bytes(shared_bytes)
    heads = {"Q_HEADS": model.q_heads, "KV_HEADS": model.kv_heads}
    shapes = [
        ("rotary", (model.q_heads + 2 * model.kv_heads) * model.head_dim, model.head_dim // 2, heads),
        ("swiglu", 2 * model.intermediate, model.intermediate, {}),
    ]
    for epilogue, n, span, more in shapes:
        tile = tiles.choose(n, model.hidden, rows, span, has_wgmma=False, max_bytes=limit)
        assert tile is not None
        built = projection(epilogue, tile, rows, arch, N=n, K=model.hidden, SPAN=span, **more)
        assert built.shared_bytes <= shared_bytes


@pytest.mark.parametrize("epilogue", ["draw", "logits"])
@pytest.mark.parametrize("rows", tiles.BUCKETS)
@pytest.mark.parametrize("hidden", [2048, 4096])
def test_head(hidden: int, rows: int, epilogue: str) -> None:
    tile = tiles.choose(128256, hidden, rows, 0, may_share=False)
    if tile is None:
        pytest.skip("the library's")
    built = projection(epilogue, tile, rows, N=128256, K=hidden, SPAN=0)
    # The noise of 128 rows wants a few registers more than there are; it is made only where somebody draws.
    spare = 160 if (epilogue, rows) == ("draw", 128) else 0
    check(built, "wgmma.mma_async" if tile.kind == "wgmma" else "mma.sync", max_spilled_bytes=spare)
    assert "cp.async.c" in built.ptx.split("griddepcontrol.wait", 1)[0]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("name", ["1B", "8B"])
def test_decode_attention(name: str, rows: int, early: bool) -> None:
    model = MODELS[name]
    cache = one_page(model, torch.bfloat16, model.block_size)
    constants = decode_attention.config(rows * model.kv_heads, model.q_heads // model.kv_heads, cache)
    num_warps = constants.pop("num_warps")
    for splits in (1, 8):
        unused = {"query_start": None} | ({"partial": None, "partial_weight": None} if splits == 1 else {})
        built = compiled_gluon(
            decode_attention_kernel, constants | unused | {"SPLITS": splits, "EARLY": early, "PDL": True}, num_warps
        )
        check(built, "mma.sync")
        assert ("cp.async.c" in built.ptx.split("griddepcontrol.wait", 1)[0]) == early


@pytest.mark.parametrize("name", ["1B", "8B"])
def test_decode_attention_of_a_mixed_batch(name: str) -> None:
    model = MODELS[name]
    cache = one_page(model, torch.bfloat16, model.block_size)
    constants = decode_attention.config(256 * model.kv_heads, model.q_heads // model.kv_heads, cache)
    unused = dict.fromkeys(["partial", "partial_weight", "counters"])
    num_warps = constants.pop("num_warps")
    more = {"SPLITS": 1, "EARLY": False, "PDL": False}
    check(compiled_gluon(decode_attention_kernel, constants | unused | more, num_warps), "mma.sync")


def test_embed() -> None:
    types = {"table": "*bf16", "token_ids": "*i32", "h": "*bf16"}
    built = compiled(embed.embed_kernel, types, embed.config(2048) | {"PDL": True})
    check(built)
    assert "st.global.v" in built.ptx
