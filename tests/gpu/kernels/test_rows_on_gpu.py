"""Row-wise kernels on CUDA at real shapes against their torch references on the same device.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import TORCH, TRITON
from photon_grpc.kernels.attention import write_kv
from photon_grpc.kernels.sampling import noise, sample, topk_topp
from photon_grpc.kernels.sampling import sample_filtered as sample_filtered
from photon_grpc.kernels.sampling.histogram import Filters
from tests.kernels.sampling import filters_of, metadata_of, noise_of, thresholds

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (hidden, intermediate, query heads, key heads, head size): Llama-3.2-1B, Llama-3.1-8B, the embedded model, a wide
# group.
SHAPES = [(2048, 8192, 32, 8, 64), (4096, 14336, 32, 8, 128), (256, 768, 4, 2, 64), (1536, 8960, 12, 2, 128)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_count = pytest.mark.parametrize("tokens", [1, 7, 300])


def close(dtype: torch.dtype) -> dict[str, float]:
    """Allow four units in the last place."""
    return {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}


@each_count
@each_shape
@each_dtype
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], tokens: int) -> None:
    hidden, _, heads, _, size = shape
    x, residual = torch.randn(2, tokens, hidden, device="cuda").to(dtype)
    weight = torch.randn(hidden, device="cuda").to(dtype)
    for mine, theirs in zip(
        TRITON.add_rms_norm(x, residual, weight, 1e-5), TORCH.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **close(dtype))
    queries = torch.randn(tokens, heads + 2, size, device="cuda").to(dtype)[:, :heads]
    weight = torch.randn(size, device="cuda").to(dtype)
    torch.testing.assert_close(
        TRITON.rms_norm(queries, weight, 1e-6), TORCH.rms_norm(queries, weight, 1e-6), **close(dtype)
    )


@each_count
@each_shape
@each_dtype
def test_rotary_and_write_kv(dtype: torch.dtype, shape: tuple[int, ...], tokens: int) -> None:
    _, _, q_heads, kv_heads, size = shape
    projection = torch.randn(tokens, q_heads + 2 * kv_heads, size, device="cuda").to(dtype)
    same = projection.clone()
    cos, sin = torch.randn(2, 4096, size // 2, device="cuda")
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    slots = torch.randperm(tokens * 3, device="cuda")[:tokens] + 16
    caches = torch.zeros(2, 2 + tokens * 3 // 16, 2, 2, kv_heads, 16, size, dtype=dtype, device="cuda")
    writes = write_kv.launch, write_kv.reference
    for kernels, write, tensor, cache in zip((TRITON, TORCH), writes, (projection, same), caches, strict=True):
        q, k, v = tensor.split((q_heads, kv_heads, kv_heads), dim=1)
        kernels.rotary(q, k, cos, sin, positions)
        write(k, v, cache, 1, slots)
    torch.testing.assert_close(projection, same, **close(dtype))
    torch.testing.assert_close(caches[0], caches[1], **close(dtype))


@each_count
@each_shape
@each_dtype
def test_swiglu(dtype: torch.dtype, shape: tuple[int, ...], tokens: int) -> None:
    gate_up = torch.randn(tokens, 2 * shape[1], device="cuda").to(dtype)
    torch.testing.assert_close(TRITON.swiglu(gate_up), TORCH.swiglu(gate_up), **close(dtype))


@each_count
@each_shape
@each_dtype
def test_geglu_and_norms_that_round_once(dtype: torch.dtype, shape: tuple[int, ...], tokens: int) -> None:
    gate_up = torch.randn(tokens, 2 * shape[1], device="cuda").to(dtype)
    bounds = {name: 8 * bound for name, bound in close(dtype).items()}
    torch.testing.assert_close(TRITON.geglu(gate_up), TORCH.geglu(gate_up), **bounds)
    x, residual = torch.randn(2, tokens, shape[0], device="cuda").to(dtype)
    weight = 1.0 + torch.randn(shape[0], device="cuda")
    for mine, theirs in zip(
        TRITON.add_rms_norm_once(x, residual, weight, 1e-6),
        TORCH.add_rms_norm_once(x, residual, weight, 1e-6),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, **close(dtype))


@each_count
@each_dtype
def test_rotary_of_the_first_numbers_of_heads(dtype: torch.dtype, tokens: int) -> None:
    projection = torch.randn(tokens, 7, 128, device="cuda").to(dtype)
    same = projection.clone()
    cos, sin = torch.randn(2, 4096, 48, device="cuda")
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    for kernels, tensor in ((TRITON, projection), (TORCH, same)):
        q, k, _ = tensor.split((3, 2, 2), dim=1)
        kernels.rotary(q[..., :96], k[..., :96], cos, sin, positions)
    torch.testing.assert_close(projection, same, **close(dtype))


def test_noise_is_the_cpus_also_where_it_is_largest() -> None:
    words = torch.arange(64) * 7919 - 5, torch.arange(64), torch.arange(64) % 4
    mine = noise_of(*(word.cuda() for word in words), torch.arange(128256).expand(64, -1).cuda()).cpu()
    theirs = noise.reference(*words, 128256)
    # Near u = 0 and u = 1 too: eight million samples have some within 2^-22 of both.
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)
    assert mine.max() > 14
    ids = torch.randint(0, 128256, (64, 50))
    kept = noise_of(*(word.cuda() for word in words), ids.cuda()).cpu()
    assert torch.equal(kept, mine.gather(1, ids))


@pytest.mark.parametrize("num_columns", [32000, 128256, 151936])
def test_topk_topp_keeps_what_sorting_keeps(num_columns: int) -> None:
    torch.manual_seed(num_columns)
    scaled = torch.randn(40, num_columns, device="cuda") * 4
    number = torch.arange(40, device="cuda")
    top_k = torch.where(number % 3 == 0, -1, number * 7 + 1)
    top_p, min_p = 1.0 - (number % 4) * 0.2, (number % 5) * 0.03
    kept = scaled >= thresholds(scaled, top_k, top_p, min_p)[:, None]
    expected = scaled >= topk_topp.reference(scaled, top_k, top_p, min_p)[:, None]
    # A sum that meets top_p but for its rounding may go either way.
    assert ((kept != expected).sum(-1) <= 1).all()


@pytest.mark.parametrize("num_rows", [1, 3, 300])
@pytest.mark.parametrize("kind", ["normal", "ties", "banned", "equal", "flat", "two values"])
def test_topk_topp_of_hard_rows_in_a_graph(kind: str, num_rows: int) -> None:
    num_columns = 128256 - 3
    number = torch.arange(num_rows, device="cuda")
    top_k = torch.tensor([-1, 1, 50, num_columns, 5000, 1000, -1, -1], device="cuda")[number % 8]
    top_p = torch.tensor([0.9, 1.0, 0.95, 0.5, 1e-4, 0.99], device="cuda")[number % 6]
    min_p = torch.tensor([0.0, 0.0, 0.05], device="cuda")[number % 3]
    scaled = torch.empty(num_rows, num_columns, device="cuda")
    graph = torch.cuda.CUDAGraph()
    thresholds(scaled.normal_(), top_k, top_p, min_p)
    with torch.cuda.graph(graph):
        out = thresholds(scaled, top_k, top_p, min_p)
    scaled.normal_().mul_(3.0)
    if kind == "ties":
        scaled.mul_(2.0).round_().div_(2.0)
    elif kind == "banned":
        scaled[:, 40:] = -torch.inf
    elif kind == "equal":
        scaled.fill_(1.5)
    elif kind == "flat":
        scaled.mul_(0.01)
    elif kind == "two values":
        scaled.copy_((scaled > 0).float() * 40.0)
    out.fill_(torch.nan)
    graph.replay()
    kept = scaled >= out[:, None]
    # A sum that meets top_p but for its rounding may go either way; what rounds the same is kept or dropped together.
    least, most = (
        topk_topp.reference(scaled.double(), top_k, (top_p.double() * (1 + e)).clamp(max=1.0), min_p.double())
        for e in (-1e-5, 1e-5)
    )
    unweighed = top_p == 1.0
    assert (kept | (scaled < least.float()[:, None]) | scaled.isinf()).all()
    assert (~kept | (scaled >= most.float()[:, None])).all()
    # A banned id cannot be sampled, whether kept or not.
    assert ((kept == (scaled >= most.float()[:, None])) | scaled.isinf())[unweighed].all()
    assert (out[min(1, num_rows - 1)] == thresholds(scaled[:2], top_k[:2], top_p[:2], min_p[:2])[-1]).all()


@pytest.mark.parametrize("num_rows", [1, 7, 64, 256])
@pytest.mark.parametrize("deviation", [0.01, 1.0, 3.0, 9.0])
def test_sample_filtered_draws_what_the_reference_draws(deviation: float, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    logits = torch.randn(num_rows, 128256, device="cuda") * deviation
    number = torch.arange(num_rows, device="cuda")
    metadata = metadata_of((number % 5 > 0) * (0.5 + number % 3 * 0.4))
    top_k = torch.tensor([-1, 50, 9, -1, 9000, -1, 1000], device="cuda")[number % 7]
    top_p = torch.tensor([0.95, 1.0, 0.9, 1.0], device="cuda")[number % 4]
    filters = filters_of(top_k, top_p, (number % 3 == 2) * 0.01)
    mine, theirs = (
        sample_filtered.launch(logits, metadata, filters),
        sample_filtered.reference(logits, metadata, filters),
    )
    # What differs by the rounding of a logarithm or of a sum may decide a close call.
    assert (mine != theirs).sum() <= num_rows // 100
    for rows in (slice(1), slice(3, 70)):
        few = metadata._replace(slots=metadata.slots[rows], context_len=metadata.context_len[rows])
        assert torch.equal(sample_filtered.launch(logits[rows], few, filters), mine[rows])


def test_rows_without_filters_draw_what_they_draw_on_the_plain_level() -> None:
    logits = torch.randn(33, 151936, device="cuda") * 2
    metadata = metadata_of(torch.arange(33, device="cuda") * 0.1)
    full = torch.ones(33, device="cuda")
    mine = sample_filtered.launch(logits, metadata, Filters((-full).long(), full, 0.0 * full))
    assert torch.equal(mine, sample.launch(logits, metadata))
