"""The shapes that graphs are captured for.

`decode`: B rows of one token. `mixed`: T tokens shared out over at most R rows: one row for a prompt alone in its step,
few rows for a short prompt that should not wait, some or all rows for a chunk of prompt beside those that decode.
Longer steps run eagerly: they hide what launching costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from photon_grpc.core.batch import Batch
from photon_grpc.runner.step import StepShape, is_decode

DECODE_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
#: Tokens of a prompt alone (at least two), of mixed steps with at most SHORT_ROWS rows, with at most MEDIUM_ROWS, and
#: with any number.
LONE_BUCKETS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
SHORT_BUCKETS = (32, 64, 128, 256, 512)
SHORT_ROWS = 16
MEDIUM_BUCKETS = (96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048)
MEDIUM_ROWS = 64
LONG_BUCKETS = (256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


class Buckets:
    """The shapes of batches of at most `max_num_seqs` rows, as far as there are shapes."""

    def __init__(self, max_num_seqs: int) -> None:
        self.rows = decode_buckets(max_num_seqs)
        self.mixed = mixed_buckets(max_num_seqs)

    def shape(self, batch: Batch) -> StepShape | None:
        """Return the smallest that holds the batch; None where none does, or prompts are scored: by hidden states that
        a graph does not keep."""
        if batch.prompt_logprob_rows:
            return None
        num_rows, num_tokens = len(batch.slots), sum(batch.counts)
        if num_rows <= self.rows[-1] and is_decode(batch):
            return decode_shape(self.rows[bisect_left(self.rows, num_rows)])
        for rows, buckets in self.mixed.items():
            # A last token of a prompt that has no decode shape, being new or yielding nothing, is no prompt of two.
            if num_rows <= rows and num_tokens <= buckets[-1] and (rows > 1 or num_tokens > 1):
                return StepShape("mixed", buckets[bisect_left(buckets, num_tokens)], rows)
        return None

    def mixed_shapes(self) -> Iterator[StepShape]:
        """Return the largest first."""
        sizes = [(tokens, rows) for rows, buckets in self.mixed.items() for tokens in buckets]
        return (StepShape("mixed", *size) for size in sorted(sizes, reverse=True))


def decode_shape(num_rows: int) -> StepShape:
    return StepShape("decode", num_rows, num_rows)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Those that a batch of at most `max_num_seqs` rows needs."""
    return DECODE_BUCKETS[: bisect_left(DECODE_BUCKETS, max_num_seqs) + 1]


def mixed_buckets(max_num_seqs: int) -> dict[int, tuple[int, ...]]:
    """Rows of mixed steps, each a decode bucket -> their buckets of tokens, the cheapest first."""
    max_rows = decode_buckets(max_num_seqs)[-1]
    few = {1: LONE_BUCKETS, SHORT_ROWS: SHORT_BUCKETS}
    if max_rows <= SHORT_ROWS:
        return few | {
            SHORT_ROWS: SHORT_BUCKETS + tuple(tokens for tokens in LONG_BUCKETS if tokens > SHORT_BUCKETS[-1])
        }
    if max_rows <= MEDIUM_ROWS:
        return few | {MEDIUM_ROWS: MEDIUM_BUCKETS}
    return few | {MEDIUM_ROWS: MEDIUM_BUCKETS, max_rows: tuple(tokens for tokens in LONG_BUCKETS if tokens > max_rows)}
