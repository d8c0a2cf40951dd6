"""How layers fall into groups, and what a plan says of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.core.kv import KVPlan, LayerKV, PageFormat, kv_groups, place
from photon_grpc.errors import ModelLoadError

FORMAT = PageFormat(heads=1, width=256, dtype="bfloat16")


def layers(*windows: int) -> list[LayerKV]:
    return [LayerKV(FORMAT, window) for window in windows]


def test_layers_that_attend_everything_are_one_group() -> None:
    groups = kv_groups(layers(*[0] * 16))
    assert [group.layers for group in groups] == [tuple(range(16))]
    plan = KVPlan(groups, 64)
    assert plan.layers_per_block == 16
    assert plan.block_bytes == 16 * 2 * 1 * 256 * 64 * 2
    assert (plan.blocks(1), plan.blocks(64), plan.blocks(65)) == (1, 1, 2)


def test_gemma_3_1b_has_one_full_group_and_six_sliding_ones_of_four() -> None:
    windows = [0 if number % 6 == 5 else 512 for number in range(26)]
    groups = kv_groups(layers(*windows))
    assert [(group.window, len(group.layers)) for group in groups] == [(0, 4), *[(512, 4)] * 5, (512, 2)]
    assert groups[0].layers == (5, 11, 17, 23)
    plan = KVPlan(groups, 16)
    assert plan.layers_per_block == 4
    assert plan.blocks(17) == 14 and plan.columns(17) == 2 and plan.tokens(15) == 32


def test_nearly_equal_counts_are_padded_not_split() -> None:
    groups = kv_groups(layers(*[128 if number % 2 == 0 else 0 for number in range(25)]))
    assert [(group.window, len(group.layers)) for group in groups] == [(0, 12), (128, 13)]


def test_layers_that_keep_unequal_pages_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="different keys and values"):
        kv_groups([LayerKV(FORMAT), LayerKV(PageFormat(2, 256, "bfloat16"))])


@given(st.lists(st.sampled_from([0, 0, 4, 16]), min_size=1, max_size=40))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window(windows: list[int]) -> None:
    groups = kv_groups(layers(*windows))
    plan = KVPlan(groups, 16)
    places = [place(groups, layer) for layer in range(len(windows))]
    assert len(set(places)) == len(windows)
    for layer, (group, plane) in enumerate(places):
        assert groups[group].window == windows[layer] and plane < plan.layers_per_block
    assert [bool(group.window) for group in groups] == sorted(bool(group.window) for group in groups)


@given(st.integers(0, 1000), st.integers(1, 70), st.sampled_from([(0,), (0, 8), (0, 8, 8)]))
def test_blocks_are_the_fewest_that_hold_the_tokens(num_tokens: int, block_size: int, windows: tuple[int, ...]) -> None:
    plan = KVPlan(kv_groups(layers(*windows)), block_size)
    num_blocks = plan.blocks(num_tokens)
    assert plan.tokens(num_blocks) >= num_tokens
    assert num_blocks == 0 or plan.tokens(num_blocks - 1) < num_tokens


@given(
    st.integers(0, 120),
    st.integers(1, 9),
    st.sampled_from([(0,), (8,), (0, 1), (0, 8), (0, 5, 12)]),
    st.integers(1, 40),
)
def test_a_windows_blocks_are_the_most_that_a_chunk_and_what_it_sees_lie_in(
    num_tokens: int, block_size: int, windows: tuple[int, ...], chunk: int
) -> None:
    def held(window: int, start: int) -> int:
        first = max(0, start - window + 1) if window else 0
        return len({position // block_size for position in range(first, start + chunk)})

    plan = KVPlan(kv_groups(layers(*windows)), block_size, chunk)
    most = [max(held(window, start) for start in range(num_tokens + 100)) for window in windows]
    every = len({position // block_size for position in range(num_tokens)})
    assert plan.blocks(num_tokens) == sum(min(every, number) for number in most)


@given(
    st.integers(0, 60), st.integers(1, 9), st.sampled_from([(0,), (0, 0, 0, 1), (0, 8), (0, 5, 12)]), st.integers(1, 40)
)
def test_the_tokens_of_blocks_are_the_most_that_need_no_more(
    num_blocks: int, block_size: int, windows: tuple[int, ...], chunk: int
) -> None:
    plan = KVPlan(kv_groups(layers(*windows)), block_size, chunk)
    most = plan.tokens(num_blocks)
    assert plan.blocks(most) <= num_blocks < plan.blocks(most + 1)


def test_windows_alone_hold_a_sequence_of_any_length() -> None:
    plan = KVPlan(kv_groups(layers(8)), 4, 16)
    assert plan.blocks(10**9) == 7
    assert plan.tokens(6) == 24 and plan.tokens(7) > 10**15


@pytest.mark.parametrize(("full", "sliding"), [(27, 1), (21, 7), (1, 27), (5, 1), (12, 12)])
def test_one_odd_layer_does_not_give_every_layer_a_group(full: int, sliding: int) -> None:
    groups = kv_groups(layers(*[0] * full, *[16] * sliding))
    assert len(groups) <= 10
    assert KVPlan(groups, 16).layers_per_block * len(groups) <= 1.3 * (full + sliding)
