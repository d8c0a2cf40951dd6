"""Row-wise kernels in the interpreter against their torch references."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import TORCH, keep_rows, norm_add, select, swiglu
from photon_grpc.kernels.attention import write_kv
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Rotation

TRITON = select("triton", "cpu")
DTYPES = [torch.float32, torch.float16]


def close(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 256), (2, 1000), (3, 5, 64), (2, 3, 96)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wide = torch.randn(shape[0], *[size + 2 for size in shape[1:]]).to(dtype)
    x = wide[:, : shape[1]] if len(shape) == 2 else wide[:, 1 : shape[1] + 1, : shape[2]]
    weight = torch.randn(shape[-1]).to(dtype)
    torch.testing.assert_close(TRITON.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5), **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual = torch.randn(3, 700).to(dtype)[:, :600], torch.randn(3, 600).to(dtype)
    weight = torch.randn(600).to(dtype)
    before = residual.clone()
    y, total = TRITON.add_rms_norm(x, residual, weight, 1e-6)
    want_y, want_total = TORCH.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, want_total)
    assert torch.equal(residual, before)
    torch.testing.assert_close(y, want_y, **close(dtype))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_norms_that_round_once(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, residual = torch.randn(3, 320).to(dtype), torch.randn(3, 320).to(dtype)
    weight = torch.randn(320).to(weight_dtype)
    heads = torch.randn(3, 5, 64).to(dtype)[:, 1:4]
    for found, expected in (
        (TRITON.rms_norm_once(x, weight, 1e-6), TORCH.rms_norm_once(x, weight, 1e-6)),
        (TRITON.rms_norm_once(heads, weight[:64], 1e-6), TORCH.rms_norm_once(heads, weight[:64], 1e-6)),
        *zip(
            TRITON.add_rms_norm_once(x, residual, weight, 1e-6),
            TORCH.add_rms_norm_once(x, residual, weight, 1e-6),
            strict=True,
        ),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, **close(dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * 1100) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([60000.0, -60000.0, 0.0, -6.0])
    # torch adds 1 and tanh, which loses the digits of small results.
    bounds = {name: 8 * bound for name, bound in close(dtype).items()}
    torch.testing.assert_close(TRITON.geglu(gate_up), TORCH.geglu(gate_up), **bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_of_the_first_numbers_of_heads(dtype: torch.dtype) -> None:
    projection = torch.randn(4, 7, 64).to(dtype)
    same = projection.clone()
    cos, sin = torch.randn(50, 24), torch.randn(50, 24)
    positions = torch.tensor([0, 49, 7, 7])
    for kernels, tensor in ((TRITON, projection), (TORCH, same)):
        q, k, _ = tensor.split((3, 2, 2), dim=1)
        kernels.rotary(q[..., :48], k[..., :48], cos, sin, positions)
    torch.testing.assert_close(projection, same, **close(dtype))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(4, 2, 64), (6, 1, 96), (3, 3, 32)])
def test_rotary(q_heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    projection = torch.randn(4, q_heads + 2 * kv_heads, size).to(dtype)
    same = projection.clone()
    cos, sin = torch.randn(50, size // 2), torch.randn(50, size // 2)
    positions = torch.tensor([0, 49, 7, 7])
    for kernels, tensor in ((TRITON, projection), (TORCH, same)):
        q, k, _ = tensor.split((q_heads, kv_heads, kv_heads), dim=1)
        kernels.rotary(q, k, cos, sin, positions)
    torch.testing.assert_close(projection, same, **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 1100).to(dtype)
    torch.testing.assert_close(TRITON.swiglu(gate_up), TORCH.swiglu(gate_up), **close(dtype))


@pytest.mark.each_value
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_tokens"), [(96, 3), (3000, 2), (2500, swiglu.WHOLE_ROWS)])
def test_norm_swiglu(
    size: int, num_tokens: int, dtype: torch.dtype, bias: bool, activation: swiglu.Activation
) -> None:  # fmt: skip
    config = swiglu.norm_config(num_tokens, size, 48, activation)
    gate_up, h = torch.randn(3, 2 * size).to(dtype), torch.randn(3, 48).to(dtype) * 3
    b = torch.randn(2 * size).to(dtype) if bias else None
    y, expected = torch.full((2, 3, size), torch.nan, dtype=dtype)
    grid = (3, -(-size // config["COLUMNS"]))
    swiglu.norm_swiglu_kernel[grid](gate_up, h, b, y, 2 * size, 1e-5, PDL=False, **config)
    swiglu.norm_reference(gate_up, h, b, 1e-5, expected, activation)
    torch.testing.assert_close(y, expected, **close(dtype))


@pytest.mark.each_value
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_slices"), [(96, 1), (1152, 1), (80, 3)])
def test_the_norm_of_a_product_is_added(size: int, num_slices: int, dtype: torch.dtype, bias: bool) -> None:
    y = torch.randn(num_slices, 3, size) if num_slices > 1 else torch.randn(3, size).to(dtype)
    b = torch.randn(size).to(dtype) if bias else None
    stream = torch.randn(3, size).to(dtype)
    mine, theirs = stream.clone(), stream.clone()
    partial, expected = torch.full((2, 3, size // 16), torch.nan)
    norm = norm_add.Norm(1 + torch.randn(size), 1e-6)
    norm_add.launch(y, b, norm, mine, partial)
    norm_add.reference(y, b, norm, theirs, expected)
    torch.testing.assert_close(mine, theirs, **close(dtype))
    torch.testing.assert_close(partial, expected, rtol=1e-2 if dtype == torch.float16 else 1e-5, atol=1e-3)
    x = (y.double().sum(0) if num_slices > 1 else y.double()) + (0 if b is None else b.double())
    normalised = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    torch.testing.assert_close(mine.double(), stream.double() + normalised, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keep_rows(dtype: torch.dtype) -> None:
    x, residual, kept = (torch.randn(3, size).to(dtype)[:, :1200] for size in (1200, 1300, 3000))
    for other, expected in ((None, x.clone()), (residual, x + residual)):
        keep_rows.launch(x, other, kept)
        assert torch.equal(kept, expected)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "more", ["", "scaled", "scaled, bias", "scaled, bias, norms", "norms", "scaled, bias, norms, part"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(4, 2, 64), (6, 1, 96), (3, 3, 32)])
def test_rotate_store(q_heads: int, kv_heads: int, size: int, dtype: torch.dtype, more: str) -> None:
    num_heads = q_heads + 2 * kv_heads
    qkv = torch.randn(4, num_heads * size).to(dtype)
    h = torch.randn(4, 80).to(dtype) * 3 if "scaled" in more else None
    bias = torch.randn(num_heads * size).to(dtype) if "bias" in more else None
    norms = (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if "norms" in more else None
    positions, slots = torch.tensor([0, 49, 7, 7]), torch.tensor([8, 17, 39, 30])
    num_pairs = size // 2 - 8 if "part" in more else size // 2
    rotation = Rotation(torch.randn(50, num_pairs), torch.randn(50, num_pairs), positions, slots)
    results = []
    for store in (rotate_store.launch, rotate_store.reference):
        q = torch.full((4, q_heads * size), torch.nan, dtype=dtype)
        cache = torch.full((5, 2, 2, kv_heads, 8, size), torch.nan, dtype=dtype)
        store(qkv, h, bias, 1e-5, HeadOutput(q, cache, 1, rotation, norms))
        results.append((q, cache))
    # A rotated number is a difference of products and may be near zero.
    tolerances = close(dtype) | {"atol": max(4 * torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)}
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, **tolerances)


@pytest.mark.parametrize(("kv_heads", "size", "block_size"), [(2, 32, 8), (3, 96, 16), (1, 64, 64)])
def test_write_kv(kv_heads: int, size: int, block_size: int) -> None:
    projection = torch.randn(6, 3 * kv_heads, size)
    k, v = projection[:, kv_heads : 2 * kv_heads], projection[:, 2 * kv_heads :]
    slots = torch.randperm(4 * block_size)[:6] + block_size
    mine, theirs = torch.zeros(2, 5, 2, 2, kv_heads, block_size, size)
    write_kv.launch(k, v, mine, 1, slots)
    write_kv.reference(k, v, theirs, 1, slots)
    assert torch.equal(mine, theirs)


def test_no_tokens_launch_nothing() -> None:
    assert TRITON.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)
    assert TRITON.swiglu(torch.empty(0, 64)).shape == (0, 32)
