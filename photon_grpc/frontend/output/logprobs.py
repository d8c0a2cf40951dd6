"""Log-probabilities on their way to the caller.

They stay packed until they are written or read: two hundred streams with twenty candidates per token have half a
million records a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import msgspec

from photon_grpc.core.generation import Candidate, TokenScore
from photon_grpc.core.logprobs import RECORD

#: An id, its log-probability (None if it has none) and its rank.
Scored = tuple[int, float | None, int]


def no_bytes(token_id: int) -> bytes:
    return b""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """A sequence of TokenScores, which are made when it is iterated."""

    #: RECORDs (core/logprobs.py), `num_records` for every position.
    records: bytes = b""
    num_records: int = 1
    token_bytes: Callable[[int], bytes] = no_bytes
    #: Ids without log-probabilities that precede the records.
    unscored: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.unscored) + len(self.records) // (self.num_records * RECORD.size)

    def __iter__(self) -> Iterator[TokenScore]:
        token_bytes = self.token_bytes
        for (token_id, logprob, rank), *others in self.positions():
            candidates = tuple([Candidate(id, value or 0.0, place, token_bytes(id)) for id, value, place in others])
            yield TokenScore(token_id, logprob, rank, token_bytes(token_id), candidates)

    def positions(self) -> Iterator[tuple[Scored, ...]]:
        """Yield for each position the id that stands there, then the others."""
        each = RECORD.iter_unpack(self.records)
        return chain((((id, None, 0),) for id in self.unscored), zip(*[each] * self.num_records, strict=True))

    @property
    def num_ids(self) -> int:
        return len(self.unscored) + len(self.records) // RECORD.size


#: For requests that ask for none.
NO_TOKEN_LOGPROBS = TokenLogprobs()


class OutputLogprobs:
    """The packed log-probabilities of an output that are not read yet."""

    __slots__ = ("_num_records", "_parts", "_token_bytes")

    def __init__(self, num_records: int, token_bytes: Callable[[int], bytes] = no_bytes) -> None:
        """Expect `num_records` for every position, 0 if none are asked for."""
        self._num_records = num_records
        self._token_bytes = token_bytes
        self._parts: list[bytes] = []

    def add(self, records: bytes) -> None:
        self._parts.append(records)

    def has_any(self) -> bool:
        return bool(self._parts)

    def take(self, num_positions: int) -> TokenLogprobs:
        """Return the first `num_positions` and drop the rest, which belongs to dropped ids."""
        if not self._parts:
            return NO_TOKEN_LOGPROBS
        records = b"".join(self._parts)[: num_positions * self._num_records * RECORD.size]
        self._parts = []
        return TokenLogprobs(records, self._num_records, self._token_bytes)

    def drop(self) -> None:
        self._parts = []


#: For outputs that ask for none.
NO_OUTPUT_LOGPROBS = OutputLogprobs(0)


class PromptLogprobs:
    """The packed log-probabilities of a prompt, held until they are complete."""

    def __init__(
        self, prompt_ids: tuple[int, ...], num_records: int, token_bytes: Callable[[int], bytes] = no_bytes
    ) -> None:
        """Expect `num_records` for every position, 0 if none are asked for."""
        self._blank = (
            TokenLogprobs(b"", num_records or 1, token_bytes, prompt_ids[:1]) if num_records else NO_TOKEN_LOGPROBS
        )
        self._num_positions = len(prompt_ids) if num_records else 0
        self._parts: list[bytes] = []

    def add(self, records: bytes) -> None:
        self._parts.append(records)

    def take(self) -> TokenLogprobs:
        """Return those of all prompt ids, nothing if the outputs ended before the prompt was computed."""
        if not self._parts and self._num_positions != 1:
            return NO_TOKEN_LOGPROBS
        whole = msgspec.structs.replace(self._blank, records=b"".join(self._parts))
        self._parts = []
        return whole if len(whole) == self._num_positions else NO_TOKEN_LOGPROBS


#: For requests that ask for none.
NO_PROMPT_LOGPROBS = PromptLogprobs((), 0)


def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Join consecutive parts of one output."""
    scored = [part for part in parts if part.records]
    return (
        msgspec.structs.replace(scored[0], records=b"".join([part.records for part in scored]))
        if scored
        else NO_TOKEN_LOGPROBS
    )
