"""Checks of the context, the KV cache and the queue, with equal results in a front end and in the engine."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.core import admission
from photon_grpc.core.frames import Facts
from photon_grpc.core.stats import Load
from photon_grpc.errors import InvalidRequest, KVCapacity, PhotonError, PromptTooLong, QueueFull
from tests.kv_plans import kv_plan

FACTS = Facts(
    max_model_len=128,
    vocab_size=512,
    kv=kv_plan(16),
    num_blocks=6,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_queue_size=4,
    max_queued_tokens=100,
    device="cpu",
    dtype="float32",
)


def raised(check: object, *args: object) -> PhotonError | None:
    try:
        check(*args)  # type: ignore[operator]
    except PhotonError as error:
        return error
    return None


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 20))
def test_the_needs_of_prompt_and_output_are_reported_with_both_numbers(
    num_prompt: int, max_tokens: int, num_blocks: int
) -> None:
    facts = msgspec.structs.replace(FACTS, num_blocks=num_blocks)
    # Every stored token takes a place; the last one drawn is never stored.
    blocks = len({position // 16 for position in range(num_prompt + max_tokens - 1)})
    error = raised(admission.check_output, num_prompt, max_tokens, facts)
    if num_prompt + max_tokens > 128:
        assert isinstance(error, PromptTooLong) and (error.needed, error.limit) == (num_prompt + max_tokens, 128)
    elif blocks > num_blocks:
        assert isinstance(error, KVCapacity) and (error.needed, error.limit) == (blocks, num_blocks)
    else:
        assert error is None
    assert error is None or error.field == "stop.max_tokens"


@given(st.integers(1, 127), st.integers(1, 20))
def test_an_unset_max_tokens_is_the_largest_that_fits(num_prompt: int, num_blocks: int) -> None:
    facts = msgspec.structs.replace(FACTS, num_blocks=num_blocks)
    most = admission.max_output_tokens(num_prompt, facts)
    assert isinstance(raised(admission.check_output, num_prompt, max(most, 0) + 1, facts), PromptTooLong | KVCapacity)
    if most >= 1:
        assert raised(admission.check_output, num_prompt, most, facts) is None
    else:
        assert isinstance(raised(admission.check_kv, num_prompt, 1, facts, "text"), KVCapacity)


def test_a_prompt_leaves_room_for_one_token() -> None:
    assert raised(admission.check_prompt, 127, 128, "text") is None
    error = raised(admission.check_prompt, 128, 128, "text")
    assert isinstance(error, PromptTooLong) and (error.field, error.needed, error.limit) == ("text", 129, 128)


@pytest.mark.parametrize(
    ("load", "num_prompt", "numbers"),
    [
        (Load(), 10_000, None),
        (Load(queued=3, queued_prompt_tokens=90), 10, None),
        (Load(queued=3, queued_prompt_tokens=90), 11, (101, 100)),
        (Load(queued=4), 1, (5, 4)),
    ],
)
def test_the_queue_is_bounded_in_requests_and_tokens_but_an_empty_one_takes_any(
    load: Load, num_prompt: int, numbers: tuple[int, int] | None
) -> None:
    error = raised(admission.check_queue, num_prompt, load, FACTS)
    assert (error and (error.needed, error.limit)) == numbers
    if error is not None:
        assert isinstance(error, QueueFull) and error.retry_after_s == load.retry_after_s == 1.0


@pytest.mark.parametrize(
    ("queued", "ended_per_s", "expected_s"), [(4, 2.0, 2.0), (1, 1000.0, 0.1), (1000, 1.0, 30.0), (4, 0.0, 1.0)]
)
def test_a_retry_waits_for_the_queue_to_drain_within_bounds(queued: int, ended_per_s: float, expected_s: float) -> None:
    assert Load(queued=queued, ended_per_s=ended_per_s).retry_after_s == expected_s


def test_ids_and_counts_name_the_field_and_both_numbers() -> None:
    assert raised(admission.check_ids, (0, 511), 512, "x") is raised(admission.check_ids, (), 512, "x") is None
    for wrong, limit in ((512, 511), (-1, 0)):
        error = raised(admission.check_ids, (1, wrong, 600), 512, "stop.stop_token_ids")
        assert isinstance(error, InvalidRequest) and error.field == "stop.stop_token_ids[1]"
        assert (error.needed, error.limit) == (wrong, limit)
    assert raised(admission.check_count, 64, 64, "x") is None
    error = raised(admission.check_count, 65, 64, "stop.stop_strings")
    assert isinstance(error, InvalidRequest) and (error.field, error.needed, error.limit) == (
        "stop.stop_strings",
        65,
        64,
    )


def test_a_window_needs_no_more_blocks_than_it_and_a_chunk_span() -> None:
    facts = msgspec.structs.replace(FACTS, kv=kv_plan(16, 0, 16, max_chunk=16), num_blocks=10)
    # Three at most in the group with the window: seven are left, of 112 tokens and one that is not stored.
    assert admission.max_output_tokens(40, facts) == 7 * 16 + 1 - 40
    admission.check_output(40, 73, facts)
    error = raised(admission.check_output, 40, 74, facts)
    assert isinstance(error, KVCapacity) and (error.needed, error.limit) == (11, 10)


def test_every_group_of_layers_needs_blocks_of_its_own() -> None:
    facts = msgspec.structs.replace(FACTS, kv=kv_plan(16, 0, 64))
    assert admission.max_output_tokens(40, facts) == 3 * 16 + 1 - 40
    admission.check_output(40, 9, facts)
    error = raised(admission.check_output, 40, 10, facts)
    assert isinstance(error, KVCapacity) and (error.needed, error.limit) == (8, 6)
