"""Near-duplicates: the same text again, or one that shares most of its runs of five lines with what came before."""

from __future__ import annotations

import hashlib

SHINGLE_LINES = 5
MAX_SEEN_SHARE = 0.4
# One run in four is kept, chosen by its hash, so that copies keep the same ones.
SAMPLED = 4


class Duplicates:
    """Remembers texts by hashes; 8 bytes each."""

    def __init__(self) -> None:
        self._texts: set[int] = set()
        self._shingles: set[int] = set()

    def is_new_text(self, text: str) -> bool:
        """True once for each text, whatever its white space; remembers it."""
        digest = _hash(" ".join(text.split()))
        is_new = digest not in self._texts
        self._texts.add(digest)
        return is_new

    def is_new_file(self, source: str) -> bool:
        """False where the text or more than 40 % of its runs of lines came before; remembers it where True."""
        lines = [line.strip() for line in source.split("\n") if line.strip()]
        runs = {
            _hash("\n".join(lines[start : start + SHINGLE_LINES]))
            for start in range(max(1, len(lines) - SHINGLE_LINES + 1))
        }
        sampled = {run for run in runs if run % SAMPLED == 0}
        if len(sampled & self._shingles) > MAX_SEEN_SHARE * len(sampled) or not self.is_new_text(source):
            return False
        self._shingles |= sampled
        return True


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
