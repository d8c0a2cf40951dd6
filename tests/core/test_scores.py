"""How many records a scored position has, and what a record is."""

from __future__ import annotations

import pytest

from photon_grpc.core.logprobs import NO_LOGPROBS, RECORD, LogprobParams


@pytest.mark.parametrize(
    ("params", "records", "prompt_records"),
    [
        (NO_LOGPROBS, 0, 0),
        (LogprobParams(num_logprobs=0), 1, 0),
        (LogprobParams(num_logprobs=5), 6, 0),
        (LogprobParams(num_logprobs=5, token_ids=(1, 2)), 8, 0),
        (LogprobParams(token_ids=(1, 2)), 3, 0),
        (LogprobParams(num_prompt_logprobs=0), 0, 1),
        (LogprobParams(num_prompt_logprobs=20, token_ids=(7,)), 2, 21),
    ],
)
def test_records_of_a_position(params: LogprobParams, records: int, prompt_records: int) -> None:
    assert (params.num_records, params.num_prompt_records) == (records, prompt_records)


def test_a_record_is_three_little_endian_numbers_of_32_bits() -> None:
    assert RECORD.pack(258, -1.5, 3) == bytes.fromhex("02010000 0000c0bf 03000000")
