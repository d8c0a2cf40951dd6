"""The attention kernels of each step: a table of shapes for a GPU of 132 multiprocessors; nothing is launched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from photon_grpc.kernels import AttentionMetadata, DependentChain, select
from photon_grpc.kernels.attention import dispatch as routes
from photon_grpc.kernels.attention import gluon_decode, hopper_varlen, torch_attention, triton_decode, triton_varlen
from photon_grpc.kernels.attention.decode_columns import programs_and_pairs
from photon_grpc.kernels.attention.decode_ring import PageShape
from photon_grpc.kernels.attention.decode_tiles import SCRATCH_BYTES, TILES, Limits, choose, divided, ring_bytes
from photon_grpc.kernels.attention.key_order import ORDERS
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE
from tests.kernels.paged import Shape, expected, paged_batch, tolerance

ONE_B, EIGHT_B, WIDE = Shape(32, 8, 64, 64), Shape(32, 8, 128, 64), Shape(8, 4, 256, 64)
CHAIN = DependentChain(torch.zeros(1, dtype=torch.int32), history_is_settled=True)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat tensors of a CPU as those of an H200."""
    monkeypatch.setattr(routes, "launches", lambda tensor: True)
    monkeypatch.setattr(routes, "can_fuse", lambda device: True)
    monkeypatch.setattr(routes, "has_wgmma", lambda device: True)
    monkeypatch.setattr(routes, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def chosen(
    shape: Shape, counts: list[int], *, chain: DependentChain | None = None, dtype: torch.dtype = torch.bfloat16,
    fewest: int | None = None, window: int = 0, in_8_bits: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the launches, in order, for rows of `counts` queries at contexts of at most 4,096."""
    pages = torch.zeros((2, 3, 2, shape.kv_heads, shape.block_size, shape.head_dim))
    pages = pages.to(PAGE_DTYPE if in_8_bits else dtype)
    lengths = torch.zeros(len(counts), dtype=torch.int32)
    meta = AttentionMetadata(
        lengths, lengths, lengths, 0.1, max(counts), 4096, min_query_len=fewest or min(counts), window=window
    )
    slots = torch.zeros(sum(counts), dtype=torch.int64)
    found = routes.dispatch(AttentionSpec(shape.q_heads, 0.1, dtype), meta, pages, slots, chain)
    assert isinstance(found, routes.KernelAttention)
    return found.launches


def named(launches: tuple[Any, ...]) -> list[Any]:
    return [launch.func if isinstance(launch, partial) else launch for launch in launches]


@pytest.mark.usefixtures("hopper")
def test_decode_steps_of_a_chain_are_one_dependent_kernel() -> None:
    (launch,) = chosen(ONE_B, [1] * 3, chain=CHAIN)
    assert launch.func is gluon_decode.launch and launch.keywords == {"chain": CHAIN}
    assert named(chosen(ONE_B, [1] * 4096, chain=CHAIN)) == [gluon_decode.launch]
    assert named(chosen(ONE_B, [1] * 4097, chain=CHAIN)) == [gluon_decode.launch_short_rows]
    assert named(chosen(Shape(32, 8, 96, 16), [1] * 3, chain=CHAIN)) == [triton_decode.launch]
    assert named(chosen(Shape(32, 1, 64, 16), [1] * 3, chain=CHAIN)) == [triton_decode.launch]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [1, 32, 33, 300])
def test_rows_of_one_query_take_the_same_kernel_in_any_number(rows: int) -> None:
    (launch,) = chosen(ONE_B, [1] * rows)
    assert launch.func is gluon_decode.launch_short_rows
    assert launch.keywords["counters"].shape == (8 * rows,) and not launch.keywords["counters"].any()
    assert named(chosen(ONE_B, [1] * rows, dtype=torch.float32)) == [triton_decode.launch]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("chain", [None, CHAIN])
@pytest.mark.parametrize(
    "shape", [ONE_B, EIGHT_B, Shape(24, 8, 128, 16), Shape(14, 2, 64, 8), Shape(32, 32, 128, 1024)]
)
def test_beside_rows_of_many_queries_those_of_one_take_the_decode_kernel(
    shape: Shape, chain: DependentChain | None
) -> None:
    both = [hopper_varlen.launch, gluon_decode.launch_short_rows]
    for counts in ([9, 1], [900, 1], [600, *[1] * 300], [9] * 60 + [1]):
        assert named(chosen(shape, counts, chain=chain)) == both
    for counts in ([9, 9], [2048], [2, 9] * 70):
        assert named(chosen(shape, counts, chain=chain)) == [hopper_varlen.launch]
    # A lone row of a captured shape: a bound of several, though it is one.
    assert named(chosen(shape, [1024], chain=chain, fewest=2)) == [hopper_varlen.launch]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("shape", "most"), [(ONE_B, 128), (EIGHT_B, 64), (Shape(64, 8, 64, 64), 64)])
def test_a_short_prompt_alone_in_its_step_takes_the_decode_kernel(shape: Shape, most: int) -> None:
    assert named(chosen(shape, [most], fewest=2)) == [gluon_decode.launch_short_rows]
    assert named(chosen(shape, [most], chain=CHAIN, fewest=2)) == [gluon_decode.launch]
    assert named(chosen(shape, [most + 1], chain=CHAIN, fewest=2)) == [hopper_varlen.launch]
    assert named(chosen(shape, [most, most], chain=CHAIN)) == [hopper_varlen.launch]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (Shape(32, 8, 128, 4), torch.bfloat16),
        (Shape(32, 8, 128, 192), torch.bfloat16),
        (Shape(32, 8, 96, 64), torch.bfloat16),
        (EIGHT_B, torch.float32),
    ],
)
def test_shapes_that_hopper_has_no_kernel_for_take_plain_triton(shape: Shape, dtype: torch.dtype) -> None:
    assert named(chosen(shape, [2048], dtype=dtype)) == [triton_varlen.launch]


@pytest.mark.usefixtures("hopper")
def test_other_devices_take_plain_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "has_wgmma", lambda device: False)
    assert named(chosen(EIGHT_B, [2048] + [1] * 60)) == [
        triton_varlen.launch,
        gluon_decode.launch_short_rows,
    ]
    assert named(chosen(EIGHT_B, [1] * 60, chain=CHAIN)) == [gluon_decode.launch]
    monkeypatch.setattr(routes, "can_fuse", lambda device: False)
    assert named(chosen(EIGHT_B, [1] * 60)) == [triton_decode.launch]


@pytest.mark.usefixtures("hopper")
def test_windows_take_the_kernels_of_all_keys() -> None:
    both = [hopper_varlen.launch, gluon_decode.launch_short_rows]
    for shape in (ONE_B, EIGHT_B, WIDE):
        assert named(chosen(shape, [600, 1], window=512)) == both
        assert named(chosen(shape, [1] * 64, window=512, chain=CHAIN)) == [gluon_decode.launch]


@pytest.mark.usefixtures("hopper")
def test_windows_of_plain_triton_are_shared_out_by_the_keys_in_sight() -> None:
    (launch,) = chosen(ONE_B, [1] * 3, window=128, dtype=torch.float32)
    assert launch.func is triton_decode.launch
    assert launch.keywords == {"splits": 2}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_of_8_bits_take_the_kernels_of_16(dtype: torch.dtype) -> None:
    for shape in (ONE_B, EIGHT_B, WIDE):
        both = [hopper_varlen.launch, gluon_decode.launch_short_rows]
        assert named(chosen(shape, [600, 1], dtype=dtype, in_8_bits=True)) == both
        assert named(chosen(shape, [1] * 64, dtype=dtype, in_8_bits=True, chain=CHAIN)) == [gluon_decode.launch]
    assert named(chosen(Shape(4, 2, 32, 64), [600, 1], in_8_bits=True)) == [triton_varlen.launch, triton_decode.launch]
    assert named(chosen(ONE_B, [600], dtype=torch.float32, in_8_bits=True)) == [triton_varlen.launch]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("chain", [None, CHAIN])
def test_a_step_of_short_rows_is_one_decode_kernel(chain: DependentChain | None) -> None:
    expected = gluon_decode.launch_short_rows if chain is None else gluon_decode.launch
    for counts in ([2], [4] * 64, [1, 8], [3, 1, 2]):
        assert named(chosen(EIGHT_B, counts, chain=chain)) == [expected]
        assert named(chosen(EIGHT_B, counts, chain=chain, dtype=torch.float32))[0] == triton_varlen.launch
    # The counters of a chain have room for so many programs.
    assert named(chosen(EIGHT_B, [8] * 1024, chain=CHAIN)) == [gluon_decode.launch]
    assert named(chosen(EIGHT_B, [8] * 1025, chain=CHAIN)) == [gluon_decode.launch_short_rows]


@pytest.mark.usefixtures("hopper")
def test_short_rows_have_a_counter_for_every_program() -> None:
    (launch,) = chosen(EIGHT_B, [8, 2, 1])
    # At most four programs share the 8 queries of 4 heads.
    assert launch.keywords["counters"].shape == (3 * 8 * 4,)
    (launch,) = chosen(Shape(28, 4, 128, 64), [3, 2])
    assert launch.keywords["counters"].shape == (2 * 4 * 4,)


def test_few_rows_share_their_queries_out_finer() -> None:
    shape = PageShape(8, 4, 128, 64, QUERIES=4)
    assert programs_and_pairs(divided(shape, 8, H200)) == (2, 8)
    assert programs_and_pairs(divided(shape, 9, H200)) == (1, 16)
    assert divided(shape._replace(QUERIES=1), 1, H200) == shape._replace(QUERIES=1)
    # Three heads of a query are as many as 8 columns hold of them.
    assert programs_and_pairs(divided(PageShape(8, 3, 128, 64, QUERIES=4), 4, H200)) == (2, 6)


@pytest.mark.usefixtures("hopper")
def test_no_tokens_launch_nothing() -> None:
    pages = torch.zeros((2, 3, 2, 8, 64, 64))
    empty = torch.zeros(0, dtype=torch.int32)
    meta = AttentionMetadata(empty, empty, empty, 0.1, max_query_len=1, max_context_len=1)
    q = torch.zeros(0, 32, 64)
    found = routes.dispatch(AttentionSpec(32, 0.1, q.dtype), meta, pages, empty, CHAIN)
    assert found.attend(q, 0).shape == q.shape


def test_a_cpu_and_kernels_of_torch_attend_in_torch() -> None:
    batch = paged_batch(Shape(6, 2, 32, 8), [1] * 4, [1, 5, 16, 33])
    slots = torch.zeros(4, dtype=torch.int64)
    spec = AttentionSpec(6, batch.meta.scale, batch.q.dtype)
    found = select("torch", "cpu").attention(spec, batch.meta, batch.cache, slots, CHAIN)
    assert isinstance(found, routes.TorchAttention)
    out = torch.full(batch.q.shape, torch.nan)
    assert found.attend(batch.q, batch.layer, out) is out
    torch.testing.assert_close(out.double(), expected(batch), **tolerance(torch.float32))
    torch.testing.assert_close(out, torch_attention.attend(batch.q, batch.cache, batch.layer, batch.meta))


H200 = Limits(132, 232_448)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_few_rows_of_long_contexts_are_shared_out_over_what_the_device_holds(head_dim: int) -> None:
    for num_pairs in (1, 2, 4, 8, 16, 24, 64, 128, 256, 512, 4096):
        shape = PageShape(8, 4, head_dim, 64)
        tile, splits = choose(num_pairs, shape, 131072, H200)
        resident = (H200.shared_bytes + 1024) // (ring_bytes(tile.UPDATE, tile.NS, shape) + 1024) * 132
        assert resident >= 132
        assert (splits > 1) == tile.SHARED
        assert splits == 1 or splits * num_pairs <= resident
        assert splits == 131072 // tile.LANE or (splits + 1) * num_pairs > resident


@pytest.mark.parametrize("num_pairs", [1, 8, 64, 128, 4096])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_tile_computes_in_one_order_of_keys(head_dim: int, num_pairs: int) -> None:
    for group in (1, 4, 16):
        for context in (1, 272, 513, 4096, 100_000):
            for limits in (H200, Limits(58, 101_376)):
                tile, _ = choose(num_pairs, PageShape(8, group, head_dim, 64), context, limits)
                assert ORDERS[head_dim] == (tile.UPDATE, tile.LANE)
    for consumers in (found for of, found in hopper_varlen.STAGES if of == head_dim):
        prompt = hopper_varlen.tile(PageShape(8, 4, head_dim, 64), consumers)
        assert ORDERS[head_dim] == (prompt.BN, prompt.LANE)


def test_short_contexts_and_large_batches_are_not_shared_out() -> None:
    lane, shape = ORDERS[64].LANE, PageShape(8, 4, 64, 64)
    assert choose(8, shape, lane, H200)[1] == 1
    assert choose(8, shape, lane + 1, H200)[1] == 2
    # As many programs as the device holds at a time.
    assert 16 <= choose(8, shape, 131072, H200)[1] <= 66
    assert choose(64 * 8, PageShape(8, 4, 128, 64), 131072, H200)[1] == 1


def test_a_window_is_shared_out_by_the_lanes_that_it_may_touch() -> None:
    assert choose(8, PageShape(8, 4, 128, 64, WINDOW=4096), 131072, H200)[1] == 5
    assert choose(8, PageShape(8, 4, 128, 64, WINDOW=4096), 2048, H200)[1] == 2
    assert choose(8, PageShape(8, 4, 128, 64, WINDOW=512), 131072, H200)[1] == 2


@pytest.mark.parametrize("limits", [Limits(108, 166_912), Limits(58, 101_376)], ids=["A100", "L4"])
def test_rings_have_room_on_devices_with_less_shared_memory(limits: Limits) -> None:
    for head_dim, entries in TILES.items():
        for most, (warps, steps) in entries:
            shape = PageShape(8, 4, head_dim, 64)
            tile, _ = choose(int(min(most, 4096)), shape, 4096, limits)
            assert ring_bytes(tile.UPDATE, tile.NS, shape) + SCRATCH_BYTES <= limits.shared_bytes
            assert warps == tile.KW and 1 <= tile.NS <= steps


Preloaded = list[tuple[torch.Tensor, torch.Tensor, int]]


@pytest.fixture
def preloaded(hopper: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Preloaded]:
    """Record (q, pages, consumers) of every launch of Hopper's kernel; nothing runs."""
    found: Preloaded = []

    def note(q: torch.Tensor, pages: torch.Tensor, plane: int, meta: Any, out: torch.Tensor, *, consumers: int) -> None:
        assert out.shape == q.shape and out.dtype == q.dtype == pages.dtype
        found.append((q, pages, consumers))

    monkeypatch.setattr(hopper_varlen, "launch", note)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    hopper_varlen.preload.cache_clear()
    yield found
    hopper_varlen.preload.cache_clear()


def test_the_first_step_of_a_shape_loads_the_kernels_of_all_numbers_of_consumers(preloaded: Preloaded) -> None:
    chosen(ONE_B, [1024])
    assert [consumers for _, _, consumers in preloaded] == [2, 3]
    chosen(ONE_B, [2048])
    assert len(preloaded) == 2
    chosen(Shape(16, 8, 64, 64), [2048])
    assert len(preloaded) == 4
    chosen(EIGHT_B, [2048])
    assert [consumers for _, _, consumers in preloaded[4:]] == [2, 3]
    chosen(WIDE, [2048])
    assert [consumers for _, _, consumers in preloaded[6:]] == [1]


def test_stand_ins_are_compiled_as_what_follows(preloaded: Preloaded) -> None:
    chosen(ONE_B, [1024])
    pages = torch.zeros((2, 3, 2, 8, 64, 64), dtype=torch.bfloat16)
    for stand_in, page, consumers in preloaded:
        assert consumers in (2, 3) and stand_in.shape[1:] == (32, 64)
        assert gluon_decode.shape(4, pages) == gluon_decode.shape(4, page)
        assert stand_in.stride(0) % 16 == 0
        assert all(stride % 16 == 0 for stride in (*page.stride()[:-1], *pages.stride()[:-1]))


def test_a_capture_holds_the_launch_alone(preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert named(chosen(ONE_B, [1024])) == [hopper_varlen.launch]
    assert preloaded == []
