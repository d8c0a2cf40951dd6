"""The tables of OpenAI's API have every field of the API and of vLLM's; the rest is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec
import pytest

from photon_grpc.core.fields import FIELDS
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.gateway.calls.fields import Accepted, Refused, Supported, Table, groups, read
from photon_grpc.gateway.openai import chat, completions, responses, tokens
from photon_grpc.gateway.openai.options import EventOptions

TABLES: Mapping[str, Table] = {
    "chat": chat.FIELDS,
    "completions": completions.FIELDS,
    "tokenize": tokens.TOKENIZE,
    "detokenize": tokens.DETOKENIZE,
}
#: What vLLM's requests have beside OpenAI's fields (vllm/entrypoints/openai, 0.11 and later).
VLLM = """
    use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words watermarking structured_outputs guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag priority request_id session_id
    logits_processors return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text
    return_mm_kwargs routed_experts_prompt_start cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection stream_interval mm_processor_kwargs media_io_kwargs add_special_tokens response_format
"""
VLLM_CHAT = """
    echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs include_reasoning
    thinking_token_budget best_of
"""


def fields_of(params: Any) -> set[str]:
    """Return the fields of a request as OpenAI's client has them, with those of a stream."""
    return set(get_type_hints(params.CompletionCreateParamsStreaming))


def test_every_field_of_openais_client_and_of_vllm_is_in_the_table() -> None:
    # Here: it takes a second.
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam

    assert fields_of(chat_create_params) | {*VLLM.split(), *VLLM_CHAT.split()} <= set(chat.FIELDS)
    assert fields_of(completion_create_params) | {*VLLM.split(), "prompt_embeds"} <= set(completions.FIELDS)
    assert set(get_type_hints(ChatCompletionStreamOptionsParam)) <= set(EventOptions.__struct_fields__)


@pytest.mark.parametrize("name", TABLES)
def test_each_entry_says_what_becomes_of_the_field(name: str) -> None:
    for field, entry in TABLES[name].items():
        if isinstance(entry, Supported):
            assert not entry.option or entry.option in FIELDS, field
            msgspec.json.schema(Any if entry.kind is Any else entry.kind)
        else:
            assert entry.note and not entry.note.endswith("."), field


@pytest.mark.parametrize("name", TABLES)
def test_null_is_unset_and_other_names_are_unknown(name: str) -> None:
    table = TABLES[name]
    assert read(table, dict.fromkeys(table)) == ({}, ())
    with pytest.raises(InvalidRequest, match="there is no such field") as unknown:
        read(table, {"modle": "a"})
    assert unknown.value.field == "modle" and "'model'" in unknown.value.message


def test_what_is_accepted_is_named_and_what_is_refused_says_why() -> None:
    for table in (chat.FIELDS, completions.FIELDS):
        for field, entry in table.items():
            if isinstance(entry, Accepted):
                assert read(table, {field: "x"}) == ({}, (field,))
            elif isinstance(entry, Refused):
                with pytest.raises(FeatureNotSupported) as refused:
                    read(table, {field: ["something else"]})
                assert refused.value.field == field and entry.note in refused.value.message
                for harmless in entry.harmless:
                    assert read(table, {field: harmless}) == ({}, ())


@pytest.mark.parametrize("priority", [1 - 2**31, 0, 2**31])
def test_lower_priorities_run_first_as_in_vllm(priority: int) -> None:
    assert groups(chat.FIELDS, {"priority": priority}) == {"scheduling": {"priority": -priority}}


@pytest.mark.parametrize("priority", [-(2**31), 2**31 + 1, 99_999_999_999])
def test_a_refused_priority_is_quoted_as_the_caller_wrote_it(priority: int) -> None:
    with pytest.raises(InvalidRequest, match=f"between -2147483647 and 2147483648, is {priority}$") as caught:
        groups(chat.FIELDS, {"priority": priority})
    assert caught.value.field == "priority"


@pytest.mark.parametrize(("given", "most"), [("off", 0), ("auto", None), (0, 0), (7, 7)])
@pytest.mark.parametrize("table", [chat.FIELDS, completions.FIELDS, responses.FIELDS])
def test_drafts_are_limited_by_a_word_or_a_number(table: Table, given: int | str, most: int | None) -> None:
    values = read(table, {"speculation": given}).supported
    assert groups(table, values) == {"scheduling": {"speculation": most}}


@pytest.mark.parametrize("given", ["on", "3", "x" * 5000, True, 1.5, [3]])
def test_other_words_for_drafts_are_refused_in_short(given: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^speculation: must be a whole number from 0 to 7, off or") as caught:
        groups(chat.FIELDS, read(chat.FIELDS, {"speculation": given}).supported)
    assert caught.value.field == "speculation" and len(caught.value.message) < 200
