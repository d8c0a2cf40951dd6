"""What a caller reads about a text that is not JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from photon_grpc.core.json_fault import json_fault


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "it is truncated"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": "bc\xff"}', "byte 0xff of a text is not UTF-8"),
        ('{"a": "\udc00"}', "character 7 is half of a surrogate pair"),
        (b'{"a":' * 10_000, "it is nested too deeply"),
        (b"{a}", "object keys must be strings (byte 1)"),
        (b'{"a": 1e400}', "number out of range"),
    ],
)
def test_the_fault_is_told_without_names_of_the_decoder(text: bytes | str, expected: str) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeError, RecursionError)) as raised:
        msgspec.json.decode(text, type=dict[str, Any])
    fault = json_fault(raised.value)
    assert expected in fault
    assert not any(word in fault for word in ("$", "Python", "recursion", "codec", "malformed"))
