"""Strings of a `format` are read by independent readers: the standard library, or the rules of the RFC written out."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from email.headerregistry import Address
from itertools import product
from urllib.parse import urlsplit

import llguidance
import pytest

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.frontend.constraints.json_schema import exact_schema
from photon_grpc.frontend.constraints.trial import byte_tokenizer, try_out
from tests.frontend.outputs import Outputs


def string(**keywords: object) -> Outputs:
    return Outputs.of_schema({"type": "string", **keywords})


def is_read(reader: Callable[[str], object], text: str) -> bool:
    try:
        reader(text)
    except ValueError:
        return False
    return True


def test_only_existing_dates_are_accepted() -> None:
    outputs = string(format="date")
    for year in (0, 1, 4, 100, 400, 999, 1000, 1900, 2000, 2023, 2024, 2100, 2400, 9996, 9999):
        for month, day in product(range(14), (0, 1, 9, 10, 28, 29, 30, 31, 32)):
            text = f"{year:04}-{month:02}-{day:02}"
            assert (f'"{text}"' in outputs) == is_read(date.fromisoformat, text), text


def test_every_year_has_its_days_of_february() -> None:
    outputs = string(format="date")
    for year in range(10_000):
        text = f"{year:04}-02-29"
        assert (f'"{text}"' in outputs) == is_read(date.fromisoformat, text), text


def test_times_are_read_by_python() -> None:
    outputs, stamps = string(format="time"), string(format="date-time")
    clocks = ("00:00:00", "23:59:59", "23:59:60", "24:00:00", "12:60:00", "12:00:00.5", "12:00:00.123456789", "12:00")
    zones = ("Z", "z", "+00:00", "-00:00", "+23:59", "-12:30", "+24:00", "+1:00", "")
    for clock, zone in product(clocks, zones):
        # Python takes more: no zone, no seconds.
        expected = is_read(time.fromisoformat, clock + zone) and zone not in ("", "z") and clock != "12:00"
        assert (f'"{clock}{zone}"' in outputs) == expected, clock + zone
        assert (f'"2024-02-29T{clock}{zone}"' in stamps) == expected
        assert f'"2023-02-29T{clock}{zone}"' not in stamps and f'"0000-01-01T{clock}{zone}"' not in stamps
    assert '"2024-02-29t12:00:00Z"' not in stamps and '"2024-02-29 12:00:00Z"' not in stamps


def is_uri(text: str) -> bool:
    """Check a URI of RFC 3986 by its appendix B, a part at a time."""
    scheme, _, rest = text.partition(":")
    if not re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme) or re.search("%(?![0-9A-Fa-f]{2})", text):
        return False
    rest, _, fragment = rest.partition("#")
    hierarchy, _, query = rest.partition("?")
    host, path = "", hierarchy
    if hierarchy.startswith("//"):
        authority, slash, path = hierarchy[2:].partition("/")
        path = slash + path
        user, at, host = authority.rpartition("@")
        if at and not re.fullmatch("[-A-Za-z0-9._~!$&'()*+,;=:%]*", user):
            return False
        host = re.sub(":[0-9]*$", "", host)
        urlsplit(f"//{host}")  # checks what stands in brackets
    host = host[1:-1] if host.startswith("[") else host
    allowed = "-A-Za-z0-9._~!$&'()*+,;=:@%/"
    return bool(
        re.fullmatch("[-A-Za-z0-9._~!$&'()*+,;=%:]*", host)
        and re.fullmatch(f"[{allowed}]*", path)
        and re.fullmatch(f"[{allowed}?]*", query)
        and re.fullmatch(f"[{allowed}?]*", fragment)
    )


def is_duration(text: str) -> bool:
    """Check a duration of RFC 3339, appendix A: consecutive units without gaps."""
    days, has_time, clock = text[1:].partition("T")
    parts = [re.sub("[0-9]+", "", part) for part in (days, clock)]
    well_formed = (
        text.startswith("P") and re.fullmatch("(?:[0-9]+[A-Z])*", days) and re.fullmatch("(?:[0-9]+[A-Z])*", clock)
    )
    is_week = parts[0] == "W" and not has_time
    return bool(
        well_formed
        and text != "P"
        and (is_week or parts[0] in "YMD")
        and parts[1] in "HMS"
        and bool(parts[1]) == bool(has_time)
    )


def is_host(text: str) -> bool:
    return all(re.fullmatch("[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", label) for label in text.split("."))


READERS: dict[str, Callable[[str], bool]] = {
    "date": lambda text: is_read(date.fromisoformat, text),
    "time": lambda text: is_read(time.fromisoformat, text) and time.fromisoformat(text).tzinfo is not None,
    "date-time": lambda text: is_read(datetime.fromisoformat, text) and datetime.fromisoformat(text).tzinfo is not None,
    "duration": is_duration,
    "email": lambda text: is_read(lambda each: Address(addr_spec=each), text),
    "hostname": is_host,
    "ipv4": lambda text: is_read(ipaddress.IPv4Address, text),
    "ipv6": lambda text: is_read(ipaddress.IPv6Address, text),
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
    "uri": is_uri,
}


def sampled(name: str, letters: str, num: int, draw: random.Random) -> list[str]:
    """Sample outputs from the characters that may follow, preferring `letters`."""
    schema = json.dumps({"type": "string", "format": name})
    matcher = llguidance.LLMatcher(byte_tokenizer(), try_out(ConstraintAsk("json_schema", schema)).grammar, log_level=0)
    texts = []
    while len(texts) < num:
        matcher.reset()
        output = bytearray()
        while len(output) < 80 and not matcher.is_accepting():
            mask = matcher.compute_bitmask()
            allowed = [id for id in range(256) if mask[id // 8] >> id % 8 & 1]
            if ord('"') in allowed and output and draw.random() < 0.2:
                allowed = [ord('"')]
            allowed = [id for id in allowed if chr(id) in letters] or allowed
            output.append(draw.choice(allowed))
            matcher.try_consume_tokens([output[-1]])
        if matcher.is_accepting():
            texts.append(json.loads(output))
    return texts


LETTERS = {
    "date": "",
    "time": "",
    "date-time": "",
    "ipv6": "1:a",
    "uri": "a:/[]1?@v.%#",
    "hostname": "a-.9",
    "email": "a-.@[]9",
}


@pytest.mark.parametrize("name", READERS)
def test_sampled_outputs_are_read(name: str) -> None:
    draw = random.Random(7)
    for letters in {"", LETTERS.get(name, "")}:
        wrong = [text for text in sampled(name, letters, 150, draw) if not READERS[name](text)]
        assert not wrong, wrong[:10]


def test_the_date_of_today_is_accepted() -> None:
    outputs = string(format="date")
    day = date(2023, 1, 1)
    while day < date(2025, 1, 1):
        assert f'"{day}"' in outputs
        day += timedelta(days=1)


def test_formats_combine_with_patterns_lengths_and_types() -> None:
    outputs = Outputs.of_schema({"type": ["string", "null"], "format": "date", "pattern": "^2"})
    assert '"2024-02-29"' in outputs and "null" in outputs
    assert '"2023-02-29"' not in outputs and '"1900-02-28"' not in outputs
    either = Outputs.of_schema({"anyOf": [{"type": "string", "format": "date"}, {"const": "never"}]})
    assert '"never"' in either and '"2023-02-29"' not in either
    untyped = Outputs.of_schema({"format": "date"})
    assert "5" in untyped and '"2023-02-29"' not in untyped


def test_unknown_formats_are_left_alone() -> None:
    for text in (
        '{"format": "uuid"}',
        '{"properties": {"format": {"const": "date"}}}',
        '{"const": {"format":"date"}}',
        '{"format',
    ):
        assert exact_schema(text) == text
