"""How many records a scored position has, and what a record is."""

from __future__ import annotations

import pytest

from photon_grpc.core.logprobs import NO_SCORES, RECORD, ScoreParams


@pytest.mark.parametrize(
    ("params", "records", "prompt_records"),
    [
        (NO_SCORES, 0, 0),
        (ScoreParams(logprobs=0), 1, 0),
        (ScoreParams(logprobs=5), 6, 0),
        (ScoreParams(logprobs=5, token_ids=(1, 2)), 8, 0),
        (ScoreParams(token_ids=(1, 2)), 3, 0),
        (ScoreParams(prompt_logprobs=0), 0, 1),
        (ScoreParams(prompt_logprobs=20, token_ids=(7,)), 2, 21),
    ],
)
def test_records_of_a_position(params: ScoreParams, records: int, prompt_records: int) -> None:
    assert (params.records, params.prompt_records) == (records, prompt_records)


def test_a_record_is_three_little_endian_numbers_of_32_bits() -> None:
    assert RECORD.pack(258, -1.5, 3) == bytes.fromhex("02010000 0000c0bf 03000000")
