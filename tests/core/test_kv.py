"""How layers fall into groups, and what a plan says of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.core.kv import KVGroup, KVPlan, LayerKV, PageFormat, Section, attached, kv_groups, place
from photon_grpc.errors import ModelLoadError

FORMAT = PageFormat(heads=1, width=256, dtype="bfloat16")


def layers(*windows: int) -> list[LayerKV]:
    return [LayerKV(FORMAT, window) for window in windows]


def test_layers_that_attend_everything_are_one_group() -> None:
    groups = kv_groups(layers(*[0] * 16))
    assert [group.layers for group in groups] == [tuple(range(16))]
    plan = KVPlan(groups, 64)
    assert plan.sections == ((FORMAT, 16),)
    assert plan.block_bytes == 16 * 2 * 1 * 256 * 64 * 2
    assert (plan.blocks(1), plan.blocks(64), plan.blocks(65)) == (1, 1, 2)


def test_gemma_3_1b_has_one_full_group_and_six_sliding_ones_of_four() -> None:
    windows = [0 if number % 6 == 5 else 512 for number in range(26)]
    groups = kv_groups(layers(*windows))
    assert [(group.window, len(group.layers)) for group in groups] == [(0, 4), *[(512, 4)] * 5, (512, 2)]
    assert groups[0].layers == (5, 11, 17, 23)
    plan = KVPlan(groups, 16)
    assert plan.sections == ((FORMAT, 4),)
    assert plan.blocks(17) == 14 and plan.columns(17) == 2 and plan.tokens(15) == 32


def test_nearly_equal_counts_are_padded_not_split() -> None:
    groups = kv_groups(layers(*[128 if number % 2 == 0 else 0 for number in range(25)]))
    assert [(group.window, len(group.layers)) for group in groups] == [(0, 12), (128, 13)]


def test_layers_that_keep_unequal_pages_share_blocks_in_sections() -> None:
    small = PageFormat(1, 256, "float8_e4m3fn")
    groups = kv_groups([LayerKV(FORMAT), LayerKV(small), LayerKV(FORMAT)])
    assert groups == (KVGroup((Section(FORMAT, (0, 2)), Section(small, (1,)))),)
    plan = KVPlan(groups, 16)
    assert plan.sections == ((FORMAT, 2), (small, 1))
    assert plan.block_bytes == 16 * (2 * 2 * 256 * 2 + 1 * 2 * 256 * 1)


#: Two heads in 16 bits, and a latent of one plane in 8.
FORMATS = FORMAT, PageFormat(1, 576, "float8_e4m3fn", planes=1)
kept_layers = st.lists(
    st.builds(LayerKV, st.sampled_from(FORMATS), st.sampled_from([0, 0, 4, 16])), min_size=1, max_size=40
)


@given(kept_layers)
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window(kept: list[LayerKV]) -> None:
    groups = kv_groups(kept)
    plan = KVPlan(groups, 16)
    places = [place(groups, layer) for layer in range(len(kept))]
    assert len(set(places)) == len(kept)
    for layer, at in enumerate(places):
        form, num_layers = plan.sections[at.section]
        assert groups[at.group].window == kept[layer].window
        assert form == groups[at.group].sections[at.section].format == kept[layer].format and at.row < num_layers
    assert [bool(group.window) for group in groups] == sorted(bool(group.window) for group in groups)
    assert all(group.layers for group in groups)


@given(kept_layers, kept_layers)
def test_a_draft_models_layers_have_rows_of_their_own_on_the_blocks_of_the_first_group(
    kept: list[LayerKV], draft_layers: list[LayerKV]
) -> None:
    groups, draft_groups = kv_groups([LayerKV(FORMAT), *kept]), kv_groups(draft_layers)
    plan = KVPlan(attached(groups, draft_groups), 16)
    own = [place(groups, layer) for layer in range(1 + len(kept))]
    assert [place(plan.groups, layer) for layer in range(len(own))] == own, "the model's own places do not move"
    first = len(groups[0].sections)
    #: The draft model's groups and sections, in order, are further sections of the first group.
    numbers = [(group, section) for group, each in enumerate(draft_groups) for section in range(len(each.sections))]
    for layer in range(len(draft_layers)):
        mine, found = place(draft_groups, layer), place(plan.groups, len(own) + layer)
        assert found == (0, first + numbers.index((mine.group, mine.section)), mine.row)
        form, num_layers = plan.sections[found.section]
        assert form == draft_layers[layer].format and found.row < num_layers
    assert [group.window for group in plan.groups] == [group.window for group in groups]
    assert plan.block_bytes >= KVPlan(groups, 16).block_bytes
    assert plan.blocks(100) == KVPlan(groups, 16).blocks(100)


def test_blocks_that_a_window_frees_keep_no_other_models_keys() -> None:
    with pytest.raises(ModelLoadError, match="sliding window"):
        attached(kv_groups(layers(4, 4)), kv_groups(layers(0)))
    assert attached(kv_groups(layers(4, 4)), ()) == kv_groups(layers(4, 4))


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
    ((_, num_layers),) = KVPlan(groups, 16).sections
    assert num_layers * len(groups) <= 1.3 * (full + sliding)
