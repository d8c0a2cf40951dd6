"""What gRPC's core writes is bounded; whatever else is written comes through as it is, however it is cut."""

from __future__ import annotations

import pytest

from photon_grpc.service.logs import log_filter
from photon_grpc.service.logs.log_filter import LogFilter

PLACE = "hpack_encoder.cc:618"
OURS = "10:00:16 front end 0: WARNING it says E1123 09:58:59.174679 1 x.cc:1] within\n"


def of_grpc(number: int, place: str = PLACE) -> str:
    return f"E1123 09:58:59.{number:06d}   11766 {place}] Ignoring key value pair due to size limit: {number}\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr(log_filter.time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_ten_of_a_place_are_written_and_the_others_counted(clock: list[float], size: int) -> None:
    flood = "".join(of_grpc(number) + (OURS if number % 50 == 0 else "") for number in range(200))
    text = (flood + of_grpc(1, "tcp_posix.cc:1")).encode()
    lines = LogFilter()
    passed = b"".join(lines.passed(text[at : at + size]) for at in range(0, len(text), size))
    clock[0] += 5
    passed += lines.passed(OURS.encode())
    written = passed.decode().splitlines(keepends=True)
    assert [line for line in written if PLACE in line] == [
        *(of_grpc(number) for number in range(10)),
        f"gRPC: 190 more lines of {PLACE}\n",
    ]
    assert written.count(OURS) == 5 and of_grpc(1, "tcp_posix.cc:1") in written
    assert len(written) == 11 + 5 + 1
    # A new interval.
    assert lines.passed(of_grpc(7).encode()) == of_grpc(7).encode()


def test_nothing_is_kept_at_the_end(clock: list[float]) -> None:
    lines = LogFilter()
    text = "".join(map(of_grpc, range(12))) + "F1123 09:58:59.000000 1 it died with"
    passed = lines.passed(text.encode()) + lines.rest()
    assert passed.decode().endswith(f"gRPC: 2 more lines of {PLACE}\nF1123 09:58:59.000000 1 it died with")


@pytest.mark.parametrize("text", ["\x1b[2K\rloading 12 %", "I am ill", "no end", "\n", "I am\nill"])
def test_drawings_and_beginnings_are_not_held_back(text: str) -> None:
    assert LogFilter().passed(text.encode()) == text.encode()
