"""The shapes that graphs are captured for.

`decode`: B rows of one token. `mixed`: T tokens split over at most R rows: one row for a prompt alone in its step,
few rows for a short prompt that should not wait, some or all rows for a chunk of prompt beside those that decode.
`verify`: R rows of a last id and drafts, T tokens of which each is sampled behind; T is a number of decode rows, since
both have the same tails. Longer steps run eagerly: they hide what launching costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from photon_grpc.core.batch import DRAFT_COUNTS, MAX_VERIFY_TOKENS, Batch
from photon_grpc.runner.step import StepShape, is_decode, is_verify

DECODE_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
#: Token buckets of a prompt alone (at least two tokens), of mixed steps with at most SHORT_ROWS rows, with at most
#: MEDIUM_ROWS, and with any number.
LONE_BUCKETS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
SHORT_BUCKETS = (32, 64, 128, 256, 512)
SHORT_ROWS = 16
MEDIUM_BUCKETS = (96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048)
MEDIUM_ROWS = 64
LONG_BUCKETS = (256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


#: Steps of few tokens have no shape of their own where one with more drafts has as few.
FEW_TOKENS = 16
#: The rows of verify steps: fewer than of decode steps, since there is a shape for each number of drafts, and surplus
#: rows of a token each cost next to nothing where products are padded to the same tile.
VERIFY_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


class Buckets:
    """The shapes of batches of at most `max_num_seqs` rows with `max_drafts` drafts each, up to the largest shape."""

    def __init__(self, max_num_seqs: int, max_drafts: int = 0) -> None:
        self.rows = decode_buckets(max_num_seqs)
        self.mixed = mixed_buckets(max_num_seqs)
        most = self.rows[-1]
        self._verify_rows = (*(rows for rows in VERIFY_ROWS if rows < most), most)
        numbers = [drafts for drafts in DRAFT_COUNTS if drafts <= max_drafts]
        #: (rows, most drafts of a row) -> the shape.
        self._verify_shapes = dict(_verify_shapes(self._verify_rows, numbers))
        #: The largest first.
        self.verify = sorted(set(self._verify_shapes.values()), reverse=True)

    @property
    def draws(self) -> set[int]:
        """The numbers of positions for which tails are captured."""
        return {*self.rows, *self.mixed, *(shape.num_draws for shape in self.verify)}

    def source(self, num_draws: int) -> StepShape:
        """Return the shape into whose output all that sample at so many positions write.

        It is a verify shape where decode steps do not have as many.
        """
        verify = (shape for shape in self.verify if shape.num_draws == num_draws > self.rows[-1])
        return next(verify, decode_shape(num_draws))

    def shape(self, batch: Batch) -> StepShape | None:
        """Return the smallest shape that holds the batch; None if there is none or the batch scores prompts."""
        if batch.prompt_logprob_rows:
            return None
        num_rows, num_tokens = len(batch.slots), sum(batch.counts)
        if batch.drafts:
            return self._verify(batch)
        if num_rows <= self.rows[-1] and is_decode(batch):
            return decode_shape(self.rows[bisect_left(self.rows, num_rows)])
        for rows, buckets in self.mixed.items():
            # A prompt alone has two tokens or more: a single one without a decode shape takes a shape of more rows.
            if num_rows <= rows and num_tokens <= buckets[-1] and (rows > 1 or num_tokens > 1):
                return StepShape("mixed", buckets[bisect_left(buckets, num_tokens)], rows)
        return None

    def _verify(self, batch: Batch) -> StepShape | None:
        """Return the shape of a step with drafts; None if a row is new, computes more, or if none holds them."""
        num_rows = len(batch.slots)
        if not is_verify(batch) or num_rows > self.rows[-1]:
            return None
        rows = self._verify_rows[bisect_left(self._verify_rows, num_rows)]
        return self._verify_shapes.get((rows, batch.drafts))

    def mixed_shapes(self) -> Iterator[StepShape]:
        """Return the mixed shapes, the largest first."""
        sizes = [(tokens, rows) for rows, buckets in self.mixed.items() for tokens in buckets]
        return (StepShape("mixed", *size) for size in sorted(sizes, reverse=True))


def decode_shape(num_rows: int) -> StepShape:
    return StepShape("decode", num_rows, num_rows)


def verify_shape(num_rows: int, num_drafts: int) -> StepShape | None:
    """Return the shape of this many rows with at most this many drafts each; None if it has too many tokens."""
    num_tokens = num_rows * (1 + num_drafts)
    if num_tokens > MAX_VERIFY_TOKENS:
        return None
    return StepShape("verify", DECODE_BUCKETS[bisect_left(DECODE_BUCKETS, num_tokens)], num_rows)


def _verify_shapes(rows: Iterable[int], numbers: Iterable[int]) -> Iterator[tuple[tuple[int, int], StepShape]]:
    """Return ((rows, drafts), shape) of those that have one."""
    for num_rows in rows:
        own = {drafts: shape for drafts in numbers if (shape := verify_shape(num_rows, drafts)) is not None}
        few = max((drafts for drafts, shape in own.items() if shape.num_tokens <= FEW_TOKENS), default=0)
        yield from (((num_rows, drafts), own[max(drafts, few)]) for drafts in own)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the buckets that a batch of at most `max_num_seqs` rows needs."""
    return DECODE_BUCKETS[: bisect_left(DECODE_BUCKETS, max_num_seqs) + 1]


def mixed_buckets(max_num_seqs: int) -> dict[int, tuple[int, ...]]:
    """Map the rows of mixed steps, each a decode bucket, to their buckets of tokens, the cheapest first."""
    max_rows = decode_buckets(max_num_seqs)[-1]
    few = {1: LONE_BUCKETS, SHORT_ROWS: SHORT_BUCKETS}
    if max_rows <= SHORT_ROWS:
        return few | {
            SHORT_ROWS: SHORT_BUCKETS + tuple(tokens for tokens in LONG_BUCKETS if tokens > SHORT_BUCKETS[-1])
        }
    if max_rows <= MEDIUM_ROWS:
        return few | {MEDIUM_ROWS: MEDIUM_BUCKETS}
    return few | {MEDIUM_ROWS: MEDIUM_BUCKETS, max_rows: tuple(tokens for tokens in LONG_BUCKETS if tokens > max_rows)}
