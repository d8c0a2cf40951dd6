"""How the kernel of 8-bit products is launched: its grid, its arguments, and the memory behind the rows it is given."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from photon_grpc.kernels.lang.jit import DRY_RUN, compiled_once
from photon_grpc.kernels.linear import fused8, library8, products8, quantize, tiles8, wide8
from photon_grpc.kernels.linear.boxes import rows_descriptor
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.fused8 import Linear8
from photon_grpc.kernels.linear.fused_linear import Gate
from photon_grpc.kernels.linear.tiles8 import Way
from photon_grpc.kernels.linear.wgmma8 import wgmma8_kernel
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from tests.kernels import fused
from tests.kernels.eight import each_format, weight_of

pytest.importorskip("triton")
SIZES = fused.Sizes(hidden=1024, q_heads=4, kv_heads=2, head_dim=128, intermediate=2048, block_size=16)


class Recorder:
    """Stands in for the kernel and keeps what it is launched with, by name."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()
        self.given: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grid = grid
        return self._launch

    def _launch(self, *args: Any, num_warps: int, **options: Any) -> None:
        assert num_warps == args[-3].KW
        bound = inspect.signature(getattr(wgmma8_kernel, "fn", wgmma8_kernel)).bind(*args)
        self.given = bound.arguments


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(products8, "wgmma8_kernel", recorder)
    monkeypatch.setattr(products8, "has_wgmma", lambda device: True)
    return recorder


def way_of(name: str, weight: Any, rows: int, span: int = 0) -> Way:
    n, k = weight.values.shape
    way = tiles8.choose(Product(n, k, rows, span, "add"), products8.kind_of(weight), may_decline=False)
    assert way is not None
    return way


@each_format
def test_ends_give_their_operands_to_the_kernel(name: str, recorder: Recorder) -> None:
    h, rows = torch.randn(5, SIZES.hidden).bfloat16(), 8
    stream, counters = fused.stream(h), torch.zeros(64, dtype=torch.int32)

    weight = weight_of(name, torch.randn(SIZES.hidden, SIZES.intermediate))
    linear, a = Linear8(weight, torch.randn(SIZES.hidden).bfloat16()), torch.randn(5, SIZES.intermediate).bfloat16()
    way = way_of(name, weight, rows)
    fused8.add_launch(stream, a, linear, way, counters)
    given = recorder.given
    assert given["w"] is weight.values and given["w_scale"] is weight.scales and given["y"] is h
    assert given["num_rows"] == 5 and given["eps"] is None and given["bias"] is None
    assert given["operands"][0] is linear.b and given["operands"][1] is stream.partial
    assert recorder.grid == (SIZES.hidden // way.tile.BN, way.slices, 1)
    assert (given["partials"] is None) == (way.slices == 1)

    weight = weight_of(name, torch.randn(2 * SIZES.intermediate, SIZES.hidden))
    linear, y = Linear8(weight, torch.randn(2 * SIZES.intermediate).bfloat16()), torch.empty(5, SIZES.intermediate)
    fused8.swiglu_launch(stream, linear, Gate(1e-5), y, way_of(name, weight, rows, SIZES.intermediate), counters)
    given = recorder.given
    assert given["y"] is y and given["bias"] is linear.b and given["partial"] is stream.partial
    assert given["eps"] == 1e-5 and SIZES.intermediate == given["P"].SPAN and rows == given["P"].BM

    problem = fused.Problem(1024, SIZES.hidden, 5, torch.bfloat16, "cpu")
    weight, cache = weight_of(name, torch.randn(1024, SIZES.hidden)), problem.cache(SIZES)
    out = HeadOutput(torch.empty(5, 512).bfloat16(), cache, fused.LAYER, problem.rotation(SIZES))
    fused8.qkv_launch(stream, Linear8(weight), 1e-5, out, way_of(name, weight, rows, 64), counters)
    given = recorder.given
    assert given["y"] is out.q and given["P"].HEADS == (4, 2, 16) and given["P"].SPAN == 64
    assert given["operands"][0] is out.rotation and given["operands"][2] == cache.stride(0)


@pytest.mark.parametrize(("num_rows", "parts"), [(5, 1), (128, 1), (257, 3), (600, 5)])
def test_rows_above_the_buckets_go_in_parts_where_the_library_has_no_such_product(
    num_rows: int, parts: int, recorder: Recorder
) -> None:
    weight = weight_of("fp8-block", torch.randn(256, 1024))
    products8.product(torch.randn(num_rows, 1024).bfloat16(), weight)
    grid, given = recorder.grid, recorder.given
    assert grid[1:] == (1, parts)
    assert given["E"] == (True, parts > 1)
    assert given["P"].BM * parts >= num_rows


def test_slices_of_each_weight_have_counters_of_their_own_one_a_tile(recorder: Recorder) -> None:
    found = []
    for weight in [weight_of("w8a8", torch.randn(256, 4096)) for _ in range(2)]:
        products8.product(torch.randn(1, 4096).bfloat16(), weight)
        tiles, slices, _ = recorder.grid
        assert slices > 1
        found.append(recorder.given["partials"][1])
        assert found[-1].tolist() == [0] * tiles
    assert found[0].data_ptr() != found[1].data_ptr()


@pytest.mark.parametrize("num_rows", [300, 5000])
@pytest.mark.parametrize(("name", "dtype"), [("w8a8", torch.bfloat16), ("fp8", torch.float16)])
def test_the_librarys_sums_become_the_same_product_and_ends(
    name: str, dtype: torch.dtype, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library8, "takes", lambda values, scales: True)
    monkeypatch.setattr(library8, "sums", sums)
    x, weight = torch.randn(num_rows, 128).to(dtype), weight_of(name, torch.randn(256, 128))
    expected = products8.reference(x, weight)
    assert torch.equal(products8.product(x, weight), expected)
    h, b = torch.randn(num_rows, 256).to(dtype), torch.randn(256).to(dtype)
    added, y = h.clone(), torch.empty(num_rows, 128).to(dtype)
    fused8.add_apart(added, x, Linear8(weight, b))
    assert torch.equal(added, (h + b) + expected)
    fused8.swiglu_apart(x, Linear8(weight, b), 1e-5, y)
    sums_of = expected if dtype == torch.bfloat16 else products8.reference(x, weight, torch.float32)
    fused8.swiglu.norm_reference(sums_of, x, b, 1e-5, h[:, :128])
    assert torch.equal(y, h[:, :128])


def sums(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return what the library returns, in torch."""
    assert len(x) <= library8.rows_at_once(len(w))
    if x.dtype == torch.int8:
        return library8.int_reference(x, w)
    total = torch.zeros(len(x), len(w))
    for part in library8.chunk_sums(x, w):
        total += part
    return total


def test_kernels_may_read_whole_buckets_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "launches", lambda tensor: True)
    monkeypatch.setattr(quantize, "quantize_rows_kernel", Recorder())
    monkeypatch.setattr(Recorder, "_launch", lambda self, *args, **options: None)
    for num_rows, padded in ((1, 8), (200, 256), (257, 384)):
        for grouped in (False, True):
            rows = quantize.launch(torch.randn(num_rows, 256), torch.float8_e4m3fn, grouped=grouped)
            assert rows.values.untyped_storage().nbytes() == padded * 256
            assert rows.values.shape == (num_rows, 256)
            assert rows.scales.shape == ((num_rows, 2) if grouped else (num_rows,))
            assert rows.scales.untyped_storage().nbytes() == 4 * padded * (2 if grouped else 1)
            assert rows.scales.stride(0) == 1


@pytest.mark.parametrize(("n", "span"), [(256, 0), (256, 128), (512, 64), (1024, 32)])
def test_the_copy_engine_sees_rows_of_w_in_the_order_of_pairs(n: int, span: int) -> None:
    values = torch.arange(n * 256).to(torch.int8).view(n, 256)
    view = rows_descriptor(values, (wide8.GROUP_ROWS, wide8.STEP), span, wide8.STEP)
    whole = view.base.as_strided(view.shape, view.strides)
    for program in range(n // wide8.GROUP_ROWS):
        row = torch.arange(wide8.GROUP_ROWS)
        pair = program * 32 + row // 16 * 8 + row % 8
        in_pairs = pair // max(1, span) * 2 * span + pair % max(1, span) + row % 16 // 8 * span
        at = (pair[0] // span, pair[0] % span // 8, 0, 0, 128) if span else (program * 64, 128)
        box = whole[
            tuple(slice(int(first), int(first) + size) for first, size in zip(at, view.block_shape, strict=True))
        ]
        expected = values[in_pairs if span else program * 64 + row, 128:]
        assert torch.equal(box.reshape(64, 128), expected)


@pytest.mark.parametrize("count", [65, 160, 256, 300])
@each_format
def test_no_copy_reaches_beyond_the_rows_of_x(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(name, torch.randn(256, 512))
    rows = quantize.memory_for(
        torch.randn(count, 512), weight.values.dtype, grouped=products8.kind_of(weight).has_blocks
    )
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launched.extend(args)

    monkeypatch.setattr(wide8, "wide8_kernel", Kernel())
    monkeypatch.setattr(wide8, "compiled_once", lambda *_, **options: None)
    monkeypatch.setattr(wide8, "num_multiprocessors", lambda device: 132)
    tensors = weight.values, weight.scales
    wide8.launch(products8.PLAIN, tensors, rows, torch.empty(count, 256), size=wide8.TileSize(1, 2))
    _, _, _, of_x, _, of_scales = launched[:6]
    # The last row has a place in the last box, which ends with the memory.
    assert count <= of_x.shape[0] < count + wide8.PART and of_x.shape[0] % of_x.block_shape[0] == 0
    assert of_scales is None or of_scales.shape == [4, of_x.shape[0]]


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (4096, 14336)])
def test_few_programs_ask_for_all_of_w_that_fits_while_x_is_rounded(n: int, k: int, rows: int) -> None:
    fp8 = tiles8.Weights(is_int=False)
    way = tiles8.choose(Product(n, k, rows, 0, "add"), fp8, may_decline=False)
    assert way is not None
    larger = way.tile._replace(NS=way.tile.NS + 1)
    assert tiles8.shared_bytes(larger, rows, fp8) > 192 << 10


def test_tiles_of_many_rows_are_those_of_the_fewest_steps() -> None:
    # Two waves of 256 rows for four of 128; one wave of half of W's rows.
    assert wide8.choose(256, 28672, 4096, 132) == (2, 2)
    assert wide8.choose(256, 28672, 4096, 132, has_blocks=True) == (1, 2)
    assert wide8.choose(256, 4096, 14336, 132) == (1, 1)


def test_kernels_are_compiled_for_other_sizes_once_and_in_every_dry_run() -> None:
    compiled: list[int] = []

    class Kernel:
        def run(self, size: int, *, grid: tuple[int], warmup: bool, num_warps: int) -> None:
            assert warmup
            assert num_warps == 4
            compiled.append(size)

    known: set[str] = set()
    for _ in range(2):
        compiled_once(Kernel(), known, "add", [(1,), (2,)], num_warps=4)
    assert compiled == [1, 2]
    before = DRY_RUN.set(True)
    try:
        compiled_once(Kernel(), known, "add", [(1,), (2,)], num_warps=4)
        compiled_once(Kernel(), known, "swiglu", [(3,)], num_warps=4)
    finally:
        DRY_RUN.reset(before)
    assert compiled == [1, 2, 1, 2, 3]
    # What a dry run requested is not compiled yet.
    assert known == {"add"}
