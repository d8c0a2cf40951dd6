"""Pages of 8 bits in torch: attention over them as in float64, and what their constants promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.kernels import select
from photon_grpc.kernels.attention import write_kv
from photon_grpc.kernels.lang.page_scales import PageScales, dequantized, power_of_two, quantized
from tests.examples import examples
from tests.kernels.paged import Shape, attend, expected, paged_batch, tolerance

TORCH = select("torch", "cpu")
rows = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 33]), st.integers(0, 90)), min_size=1, max_size=5)


@settings(max_examples=examples(30))
@given(st.sampled_from([8, 64]), rows, st.integers(0, 99), st.sampled_from([0, 0, 5, 40]))
def test_any_mix_of_rows_equals_dense_attention_over_the_values_of_the_pages(
    block_size: int, rows: list[tuple[int, int]], seed: int, window: int
) -> None:
    counts = [count for count, _ in rows]
    contexts = [count + before for count, before in rows]
    batch = paged_batch(Shape(6, 2, 32, block_size), counts, contexts, seed=seed, window=window, in_8_bits=True)
    out = attend(TORCH, batch.q, batch.cache, batch.layer, batch.meta)
    torch.testing.assert_close(out.double(), expected(batch), **tolerance(torch.float32))


def all_e4m3() -> list[float]:
    """Return the finite numbers of e4m3 that are not negative, from their definition."""
    small = [number * 2.0**-9 for number in range(8)]
    return small + [(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]


@given(st.floats(-600, 600, width=32), st.sampled_from([1.0, 0.25, 0.3, 7.0]))
def test_a_number_is_the_nearest_of_the_page_and_of_two_as_near_the_even_one(x: float, scale: float) -> None:
    scales = PageScales.ones(1, torch.zeros(1, dtype=torch.int64))
    scales.set(torch.full((2, 1), scale))
    found = quantized(torch.full((1, 2, 1, 1), x), scales, torch.tensor([9]), 8).float()[0, 0].item()
    wanted = (torch.tensor(x) * scales.inverse[0, 0]).item()
    grid = all_e4m3()
    nearest = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(wanted)), i % 2))
    assert found == math.copysign(grid[nearest], wanted)
    assert scales.saturated.item() == 2 * (abs(wanted) > 448)


@given(st.floats(1e-6, 1e6))
def test_a_power_of_two_leaves_headroom_and_rounds_no_value_of_a_page(largest: float) -> None:
    scale = power_of_two(largest)
    assert math.frexp(scale)[0] == 0.5 and 448 / 4 < largest / scale <= 448 / 2
    numbers = torch.arange(256, dtype=torch.uint8)
    values = numbers.view(torch.float8_e4m3fn).double() * scale
    assert torch.equal(
        dequantized(numbers, torch.tensor(scale), torch.bfloat16).double().nan_to_num(), values.nan_to_num()
    )


def test_nothing_but_zeros_needs_no_scale() -> None:
    assert power_of_two(0.0) == 1.0


@pytest.mark.parametrize("is_nan", [False, True])
def test_padding_is_not_counted_and_nan_stays(is_nan: bool) -> None:
    scales = PageScales.ones(2, torch.zeros(1, dtype=torch.int64))
    k, v = torch.full((2, 3, 2, 16), torch.nan if is_nan else 1000.0)
    cache = torch.zeros((3, 1, 2, 2, 8, 16)).to(torch.float8_e4m3fn)
    write_kv.reference(k, v, cache, 0, torch.tensor([3, 8, 17]), scales)
    written = cache[1:].float()
    assert scales.saturated.item() == (0 if is_nan else 2 * 2 * 2 * 16)
    assert written.isnan().sum() == (2 * 2 * 2 * 16 if is_nan else 0) and (is_nan or written.max() == 448)
