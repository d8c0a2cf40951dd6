"""The torch references of the row-wise operations against transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3 import modeling_phi3

from photon_grpc.kernels import select

kernels = select("torch", "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rounding(dtype: torch.dtype) -> dict[str, float]:
    """Allow two units in the last place."""
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256), (7, 2048), (5, 3, 64), (4, 2, 96)])
def test_rms_norm_is_llamas(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(shape[-1], eps=1e-5)
    norm.weight.data = torch.randn(shape[-1]).to(dtype)
    x = (torch.randn(shape) * 3).to(dtype)
    torch.testing.assert_close(kernels.rms_norm(x, norm.weight.data, 1e-5), norm(x).detach(), **rounding(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_a_sum_and_then_the_norm(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(320, eps=1e-6)
    norm.weight.data = torch.randn(320).to(dtype)
    x, residual = torch.randn(6, 320).to(dtype), torch.randn(6, 320).to(dtype)
    before = residual.clone()
    y, total = kernels.add_rms_norm(x, residual, norm.weight.data, 1e-6)
    assert torch.equal(total, before + x)
    assert torch.equal(residual, before)
    torch.testing.assert_close(y, norm(before + x).detach(), **rounding(dtype))


@pytest.mark.parametrize("joined", [True, False], ids=["one projection", "apart"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(4, 2, 64), (6, 1, 96), (8, 8, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_llamas(q_heads: int, kv_heads: int, size: int, joined: bool, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 5, 3, 99, 42])
    angles = torch.outer(torch.arange(100.0), 10000.0 ** -(torch.arange(0, size, 2) / size))
    projection = torch.randn(5, q_heads + 2 * kv_heads, size).to(dtype)
    q, k, v = projection.split((q_heads, kv_heads, kv_heads), dim=1)
    if not joined:
        q, k = q.clone(), k.clone()
    values = v.clone()
    full = torch.cat((angles, angles), -1)[positions]
    # In float32: transformers rounds its tables to x's dtype, the product keeps them.
    want = apply_rotary_pos_emb(q.float(), k.float(), full.cos(), full.sin(), unsqueeze_dim=1)
    got = kernels.rotary(q, k, angles.cos(), angles.sin(), positions)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs.to(dtype), **rounding(dtype))
    assert got[0].data_ptr() == q.data_ptr()
    assert got[1].data_ptr() == k.data_ptr()
    assert torch.equal(v, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 320), (4, 2, 96)])
def test_a_norm_that_rounds_once_is_olmos_and_with_one_added_gemmas(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    olmo, gemma = Olmo2RMSNorm(shape[-1], eps=1e-6), Gemma3RMSNorm(shape[-1], eps=1e-6)
    for norm, own in ((olmo, weight), (gemma, 1.0 + weight.float())):
        norm.weight.data = weight
        expected = norm(x).detach()
        torch.testing.assert_close(kernels.rms_norm_once(x, own, 1e-6), expected, **rounding(dtype))
        if len(shape) == 2:
            y, total = kernels.add_rms_norm_once(x, x, own, 1e-6)
            assert torch.equal(total, x + x)
            torch.testing.assert_close(y, norm(x + x).detach(), **rounding(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_numbers_of_heads_are_rotated_as_phi_does(dtype: torch.dtype) -> None:
    positions, rotated = torch.tensor([0, 5, 3, 99, 42]), 48
    angles = torch.outer(torch.arange(100.0), 10000.0 ** -(torch.arange(0, rotated, 2) / rotated))
    projection = torch.randn(5, 8, 64).to(dtype)
    q, k, v = projection.split((4, 2, 2), dim=1)
    values = v.clone()
    full = torch.cat((angles, angles), -1)[positions]
    want = modeling_phi3.apply_rotary_pos_emb(q.float(), k.float(), full.cos(), full.sin(), unsqueeze_dim=1)
    kernels.rotary(q[..., :rotated], k[..., :rotated], angles.cos(), angles.sin(), positions)
    for mine, theirs in zip((q, k), want, strict=True):
        torch.testing.assert_close(mine, theirs.to(dtype), **rounding(dtype))
    assert torch.equal(v, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu_is_gemmas(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * 100) * 4).to(dtype)
    before = gate_up.clone()
    want = ACT2FN["gelu_pytorch_tanh"](gate_up[:, :100]) * gate_up[:, 100:]
    torch.testing.assert_close(kernels.geglu(gate_up), want, **rounding(dtype))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_llamas(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * 100) * 4).to(dtype)
    before = gate_up.clone()
    want = ACT2FN["silu"](gate_up[:, :100]) * gate_up[:, 100:]
    torch.testing.assert_close(kernels.swiglu(gate_up), want, **rounding(dtype))
    assert torch.equal(gate_up, before)
