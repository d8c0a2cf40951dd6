"""Products of 8-bit numbers on CUDA, to the last bit: any number of rows, every way, the library, and the references.

CUBLAS_WORKSPACE_CONFIG=:0:0 python -m pytest -m gpu tests/gpu/kernels/test_products8_on_gpu.py
"""

from __future__ import annotations

import itertools

import pytest
import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import fused8, library8, products8, quantize, tiles8, wide8
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.fused8 import Linear8
from photon_grpc.kernels.linear.fused_linear import Gate
from photon_grpc.kernels.linear.products8 import PARTS, PLAIN, Weight8
from photon_grpc.kernels.linear.quantize import QuantizedRows
from photon_grpc.kernels.linear.tiles8 import Way
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from tests.kernels import fused
from tests.kernels.eight import FORMATS, each_format, exact, weight_of
from tests.kernels.fused import EPS, LAYER, Sizes, stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs wgmma"
    ),
]
#: Llama-3.1-8B's qkv, output and down; Llama-3.2-1B's output; Qwen2.5-0.5B's qkv; SmolLM2's output, half a chunk short.
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (2048, 2048), (1152, 896), (960, 960)]
COUNTS = (1, 3, 8, 9, 16, 33, 64, 65, 128, 200, 256, 257, 600)
each_shape = pytest.mark.parametrize(("n", "k"), SHAPES)


def weight(name: str, n: int, k: int) -> Weight8:
    if FORMATS[name][1] and n % 128:
        pytest.skip("blocks have 128 rows")
    generator = torch.Generator("cuda").manual_seed(n + k)
    return weight_of(name, torch.randn(n, k, generator=generator, device="cuda") * k**-0.5)


def on_cpu(w: Weight8) -> Weight8:
    return Weight8(w.values.cpu(), w.scales.cpu())


def inputs(rows: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(rows, k, generator=torch.Generator().manual_seed(k)) * 2).to(dtype).cuda()


def with_garbage(rows: QuantizedRows, kind: torch.dtype) -> QuantizedRows:
    """Return the rows in memory whose rest is NaN, or -1 where there is no NaN."""
    tokens, k = rows.values.shape
    padded = quantize.padded_rows(tokens)
    values = torch.full((padded, k), 0xFF, dtype=torch.uint8, device="cuda").view(kind)
    values[:tokens] = rows.values
    groups = rows.scales.shape[1] if rows.scales.dim() == 2 else 1
    scales = torch.full((groups, padded), torch.nan, device="cuda")
    scales[:, :tokens] = rows.scales.reshape(tokens, groups).t()
    return QuantizedRows(values[:tokens], scales[:, :tokens].t() if rows.scales.dim() == 2 else scales[0, :tokens])


def by(way: Way, w: Weight8, rows: QuantizedRows, *, in_parts: bool = False) -> torch.Tensor:
    """Return the product in float32 by this way."""
    y = torch.full((rows.values.shape[0], w.values.shape[0]), torch.nan, device="cuda")
    counters = torch.zeros(8192, dtype=torch.int32, device="cuda")
    products8.launch(PLAIN, way, w, rows, y, counters=counters, in_parts=in_parts)
    assert not counters.any()
    return y


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [896, 960, 4096, 14336, 28672])
@each_format
def test_rows_have_the_bits_of_the_reference(name: str, size: int, dtype: torch.dtype) -> None:
    kind, grouped = FORMATS[name]
    x = inputs(33, size, dtype)
    x[3], x[4, 5], x[5, 7] = 0.0, torch.nan, -torch.inf
    for count in (1, 33):
        expected = quantize.reference(x[:count].cpu(), kind, grouped=grouped)
        rows = quantize.launch(x[:count].contiguous(), kind, grouped=grouped)
        assert torch.equal(rows.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))
        torch.testing.assert_close(rows.scales.cpu(), expected.scales, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("kind", list(quantize.LIMITS), ids=str)
def test_every_bf16_is_rounded_as_in_the_reference(kind: torch.dtype) -> None:
    numbers = torch.arange(65536).to(torch.uint16).view(torch.bfloat16)
    x = numbers[numbers.isfinite() & (numbers.abs() <= quantize.LIMITS[kind])]
    x = torch.cat((x, torch.full((-len(x) % 512,), quantize.LIMITS[kind]).bfloat16())).view(-1, 512)
    x[:, 0] = quantize.LIMITS[kind]
    expected, rows = quantize.reference(x, kind), quantize.launch(x.cuda(), kind)
    assert torch.equal(rows.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))


# -- products ----------------------------------------------------------------------------------------------------------


@each_shape
def test_int8_by_every_way_has_the_bits_of_the_reference(n: int, k: int) -> None:
    w, x = weight("w8a8", n, k), inputs(128, k)
    expected = products8.reference(x.cpu(), on_cpu(w), torch.float32).cuda()
    for count in quantize.ROWS:
        rows = with_garbage(quantize.launch(x[: count - 3], torch.int8), torch.int8)
        for way in tiles8.candidates(Product(n, k, count, 0, "add"), products8.kind_of(w)):
            assert torch.equal(by(way, w, rows), expected[: count - 3]), way


@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
@each_shape
def test_fp8_by_every_way_has_the_same_bits(name: str, n: int, k: int) -> None:
    w, x = weight(name, n, k), inputs(256, k)
    kind, grouped = FORMATS[name]
    product = Product(n, k, 64, 0, "add")
    chosen = tiles8.choose(product, products8.kind_of(w), may_decline=False)
    assert chosen is not None
    quantized = [quantize.launch(x[first : first + 64], kind, grouped=grouped) for first in range(0, 256, 64)]
    expected = torch.cat([by(chosen, w, rows) for rows in quantized])
    error = (expected.double().cpu() - exact(x.cpu(), on_cpu(w))).norm()
    assert error <= 1e-3 * expected.double().norm()
    for count in quantize.ROWS:
        rows = with_garbage(quantize.launch(x[: count - 3], kind, grouped=grouped), kind)
        for way in tiles8.candidates(product._replace(rows=count), products8.kind_of(w)):
            assert torch.equal(by(way, w, rows), expected[: count - 3]), way
    rows = with_garbage(quantize.launch(x[:200], kind, grouped=grouped), kind)
    for way in PARTS:
        if n % way.tile.BN == 0:
            assert torch.equal(by(way, w, rows, in_parts=True), expected[:200])


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
@each_shape
def test_the_library_has_the_bits_of_our_kernels(name: str, n: int, k: int) -> None:
    w = weight(name, n, k)
    assert library8.takes(w.values, w.scales)
    for count in (17, 64, 600, 5000):
        # PARTS read 128 rows of memory at least.
        whole = products8.quantized(inputs(max(count, 128), k), w)
        rows = QuantizedRows(whole.values[:count], whole.scales[:count])
        sums = library8.sums(rows.values, w.values).float() * w.scales[0] * rows.scales[:, None]
        expected = by(PARTS[1], w, rows, in_parts=True)
        assert torch.equal(sums[-200:], expected[-200:]), count
        assert torch.equal(library8.scaled(rows, w.values, w.scales, torch.bfloat16), expected.bfloat16()), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_shape
@each_format
def test_a_row_has_the_same_bits_in_any_company(name: str, n: int, k: int, dtype: torch.dtype) -> None:
    w, x = weight(name, n, k), inputs(600, k, dtype)
    together = products8.product(x, w)
    expected = exact(x[:8].cpu(), on_cpu(w))
    assert (together[:8].double().cpu() - expected).norm() <= 5e-3 * expected.norm()
    for count in COUNTS:
        assert torch.equal(products8.product(x[:count], w), together[:count]), count


# -- ends --------------------------------------------------------------------------------------------------------------

SIZES = [Sizes(2048, 32, 8, 64, 8192), Sizes(4096, 32, 8, 128, 14336, 64), Sizes(896, 14, 2, 64, 4864, 64)]


def each_end() -> pytest.MarkDecorator:
    """Return all combinations of rows, dtype and bias; `full` but for one or two of each rows."""
    cases = []
    for number, rows in enumerate([1, 8, 13, 33, 128, 250]):
        kept = [(torch.bfloat16, number % 2 == 1)] + [(torch.float16, True)] * (rows == 13)
        for dtype, bias in itertools.product([torch.bfloat16, torch.float16], [False, True]):
            marks = () if (dtype, bias) in kept else pytest.mark.full
            cases.append(pytest.param(rows, dtype, bias, marks=marks, id=f"{rows}-{dtype}-{bias}"))
    return pytest.mark.parametrize(("rows", "dtype", "bias"), cases)


@each_end()
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@each_format
def test_fused_ends_have_the_bits_of_two_kernels(
    name: str, sizes: Sizes, rows: int, dtype: torch.dtype, bias: bool
) -> None:
    n = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim
    w = weight(name, n, sizes.hidden)
    problem = fused.Problem(n, sizes.hidden, min(rows, 128), dtype, "cuda", bias=bias)
    rotation, cache = problem.rotation(sizes), problem.cache(sizes)
    h = problem.x
    way = way_for(w, h.shape[0], "rotary", sizes.head_dim // 2)
    outs = [HeadOutput(torch.empty(len(h), sizes.q_heads * sizes.head_dim, dtype=dtype, device="cuda"), cache.clone(),
                       LAYER, rotation) for _ in range(2)]  # fmt: skip
    fused8.qkv_launch(stream(h), Linear8(w, problem.b), EPS, outs[0], way, problem.counters)
    fused8.qkv_apart(h, Linear8(w, problem.b), EPS, outs[1])
    assert torch.equal(outs[0].q, outs[1].q)
    assert torch.equal(outs[0].cache.nan_to_num(), outs[1].cache.nan_to_num())

    up = weight(name, 2 * sizes.intermediate, sizes.hidden)
    b = torch.randn(2 * sizes.intermediate, device="cuda").to(dtype) if bias else None
    y, expected = (torch.full((len(h), sizes.intermediate), torch.nan, dtype=dtype, device="cuda") for _ in range(2))
    way = way_for(up, len(h), "swiglu", sizes.intermediate)
    counters = torch.zeros(8192, dtype=torch.int32, device="cuda")
    fused8.swiglu_launch(stream(h), Linear8(up, b), Gate(EPS), y, way, counters)
    fused8.swiglu_apart(h, Linear8(up, b), EPS, expected)
    assert torch.equal(y, expected)

    down = weight(name, sizes.hidden, sizes.intermediate)
    b = torch.randn(sizes.hidden, device="cuda").to(dtype) if bias else None
    added, changed = h.clone(), stream(h.clone())
    fused8.add_launch(changed, y, Linear8(down, b), way_for(down, len(h), "add", 0), counters)
    fused8.add_apart(added, y, Linear8(down, b))
    assert torch.equal(changed.h, added)
    assert torch.equal(changed.partial, squares.reference(added))


@pytest.mark.parametrize("size", wide8.SIZES)
@each_shape
@each_format
def test_many_rows_have_the_bits_of_few(name: str, n: int, k: int, size: wide8.TileSize) -> None:
    w = weight(name, n, k)
    if n % wide8.ROWS or size not in wide8.sizes(has_blocks=FORMATS[name][1]):
        pytest.skip("tiles have 128 rows of W, and of blocks one part of x")
    for count in (129, 256, 300, 2500):
        rows = with_garbage(products8.quantized(inputs(count, k), w), w.values.dtype)
        y = torch.full((count, n), torch.nan, dtype=torch.bfloat16, device="cuda")
        wide8.launch(PLAIN, (w.values, w.scales), rows, y, size=size)
        assert torch.equal(y, by(PARTS[1], w, rows, in_parts=True).bfloat16()), count


@pytest.mark.parametrize(("rows", "bias"), [(129, False), (250, True), (700, False)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@each_format
def test_ends_of_many_rows_have_the_bits_of_two_kernels(
    name: str, sizes: Sizes, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, dtype = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim, torch.bfloat16
    problem = fused.Problem(n, sizes.hidden, rows, dtype, "cuda", bias=bias)
    rotation, cache, h = problem.rotation(sizes), problem.cache(sizes), problem.x
    qkv, up = weight(name, n, sizes.hidden), weight(name, 2 * sizes.intermediate, sizes.hidden)
    down = weight(name, sizes.hidden, sizes.intermediate)
    b = torch.randn(2 * sizes.intermediate, device="cuda").to(dtype) if bias else None
    found = []
    for is_wide in (True, False):
        if not is_wide:
            monkeypatch.setattr(wide8, "takes", lambda *_: False)
        q = torch.empty(rows, sizes.q_heads * sizes.head_dim, dtype=dtype, device="cuda")
        out = HeadOutput(q, cache.clone(), LAYER, rotation)
        fused8.qkv_apart(h, Linear8(qkv, problem.b), EPS, out)
        y = torch.full((rows, sizes.intermediate), torch.nan, dtype=dtype, device="cuda")
        fused8.swiglu_apart(h, Linear8(up, b), EPS, y)
        added = h.clone()
        fused8.add_apart(added, y, Linear8(down, b[: sizes.hidden] if b is not None else None))
        found.append((out.q, out.cache.nan_to_num(), y, added))
    for of_wide, expected in zip(*found, strict=True):
        assert torch.equal(of_wide, expected)


@pytest.mark.parametrize("rows", [1, 300])
@each_format
def test_rows_are_quantized_with_their_norms(name: str, rows: int) -> None:
    kind, grouped = FORMATS[name]
    x, of_norm = inputs(rows, 896), torch.rand(896, device="cuda").bfloat16()
    expected = quantize.reference(x.cpu(), kind, grouped=grouped, weight=of_norm.cpu())
    found = quantize.launch(x, kind, grouped=grouped, weight=of_norm, eps=EPS)
    assert torch.equal(found.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert found.norms is not None
    # Their bits are compared behind products.
    torch.testing.assert_close(found.norms.cpu(), (x.float().square().mean(1).cpu() + EPS).rsqrt())


def way_for(w: Weight8, num_rows: int, end: str, span: int) -> Way:
    n, k = w.values.shape
    rows = tiles8.bucket(num_rows)
    way = tiles8.choose(Product(n, k, rows or 0, span, end), products8.kind_of(w), may_decline=False)  # type: ignore[arg-type]
    assert way is not None
    return way
