"""Reused slots: whichever requests were there before or run beside it, an output is that of the request alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from photon_grpc import LLM
from photon_grpc.core.fields import FIELDS
from tests.properties.drawn_requests import OPTIONS, complete, drawn_requests, together, unshrunk

#: Constraints: tests/compose/test_structured_output.py and test_typed_output.py; of chats: test_answers.py.
ELSEWHERE = {
    *("json_schema", "json_object", "regex", "choices", "grammar", "message_type"),
    *("tools", "tools_json", "tool_choice", "template_args_json", "add_generation_prompt"),
    # Of the prompt alone.
    "parse_special_tokens",
}


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(device="cpu", max_num_seqs=3, num_blocks=64, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module", params=[{"async_depth": 0, "num_blocks": 30}, {"async_depth": 1, "num_blocks": 64}])
def crowded(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(device="cpu", max_num_seqs=3, max_num_batched_tokens=24, block_size=4, **request.param) as llm:
        yield llm


def test_every_option_of_a_request_is_drawn() -> None:
    assert OPTIONS.keys() == {name for name, field in FIELDS.items() if field.is_for_llm} - ELSEWHERE


@given(drawn_requests)
@unshrunk
def test_nothing_of_a_request_reaches_the_next_in_its_slot_or_its_neighbours(alone: LLM, crowded: LLM, many) -> None:  # type: ignore[no-untyped-def]
    assert together(crowded, many) == [complete(alone, one) for one in many]
