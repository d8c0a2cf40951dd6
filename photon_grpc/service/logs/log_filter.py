"""A bound on the lines that gRPC's core writes to stderr, one for every refused call, with no setting for fewer."""

from __future__ import annotations

import re
import time
from collections import Counter

#: Lines from one place in gRPC's code in an interval; one line counts the others.
_MAX_LINES = 10
_INTERVAL_S = 5.0
#: `E1123 09:58:59.174679   11766 hpack_encoder.cc:618] `, as absl writes it.
_BEGINNING = rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ "
_LINE = re.compile(_BEGINNING + rb"([\w./-]+:\d+)\] ")
_SOME = re.compile(rb"^" + _BEGINNING, re.MULTILINE)
#: At the end of a piece: the beginning of such a line, or what may become one.
_UNFINISHED = re.compile(rb"[IWEF](?:\d{4} .*|\d{0,4})\Z")


class LogFilter:
    """The filter for the output of all processes, which comes in pieces."""

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._counts: Counter[bytes] = Counter()
        #: A line of the core whose end has not come.
        self._unfinished = b""
        self._is_amid_a_line = False

    def passed(self, piece: bytes) -> bytes:
        """Return the part to be written, after the number of lines dropped in the last interval if that is over."""
        due = b"" if self._is_amid_a_line else self._summed_up()
        data, self._unfinished = self._unfinished + piece, b""
        begin = data.rfind(b"\n") + 1
        if (begin or not self._is_amid_a_line) and _UNFINISHED.match(data, begin):
            data, self._unfinished = data[:begin], data[begin:]
        if _SOME.search(data):
            data = b"".join([line for line in data.splitlines(keepends=True) if self._may_pass(line)])
        if data:
            self._is_amid_a_line = not data.endswith(b"\n")
        return due + data

    def rest(self) -> bytes:
        """Return the rest after the last piece."""
        self._begun_s -= _INTERVAL_S
        return self._summed_up() + self._unfinished

    def _may_pass(self, line: bytes) -> bool:
        found = _LINE.match(line)
        if found is None:
            return True
        place = found[1]
        self._counts[place] += 1
        return self._counts[place] <= _MAX_LINES

    def _summed_up(self) -> bytes:
        now_s = time.monotonic()
        if now_s < self._begun_s + _INTERVAL_S:
            return b""
        counts, self._counts, self._begun_s = self._counts, Counter(), now_s
        surplus = {place.decode(): count - _MAX_LINES for place, count in counts.items() if count > _MAX_LINES}
        return "".join(f"gRPC: {count} more lines of {place}\n" for place, count in surplus.items()).encode()
