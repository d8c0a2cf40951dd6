"""Bodies: one JSON object, within limits."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.errors import InvalidRequest, MalformedMessage
from photon_grpc.gateway.calls.body import MAX_CONTAINERS, MAX_MARKS, MAX_STRINGS, MAX_VALUES, parsed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"{} {}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\xff"}',
        b"\xff\xfe{\x00}\x00",
        b'{"a": "\\ud800"}',
        b'{"a":' * 10_000,
        b"[" * 10_000,
        b"{'a': 1}",
        b'{"a": 1,}',
    ],
)
def test_other_bodies_are_malformed(body: bytes) -> None:
    with pytest.raises(MalformedMessage, match="JSON"):
        parsed(body)


def test_too_many_values_are_refused_before_they_are_parsed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(b'{"prompt": [' + b"1," * MAX_VALUES + b"1]}")
    assert (caught.value.needed, caught.value.limit) == (MAX_VALUES + 1, MAX_VALUES)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b'{"a": [' + (b"[" * 9 + b"]" * 9 + b",") * MAX_CONTAINERS + b"1]}", MAX_CONTAINERS),
        (b'{"a": [' + b"{}," * MAX_CONTAINERS + b"1]}", MAX_CONTAINERS),
        (b'{"a": [' + b'"",' * MAX_STRINGS + b'""]}', MAX_STRINGS),
        (b'{"a": "' + b'[\\"' * MAX_MARKS + b'"}', MAX_MARKS),
    ],
)
def test_what_takes_long_to_parse_is_refused_before(body: bytes, limit: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(body)
    assert caught.value.limit == limit


def test_a_text_may_hold_any_number_of_commas_and_brackets() -> None:
    text = "[{,]}" * 100_000 + '\\"[' * 1000
    assert parsed(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_malformed(body: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        assert isinstance(parsed(body), dict)
