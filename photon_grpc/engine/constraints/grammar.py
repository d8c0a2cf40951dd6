"""Constrained outputs: which ids may follow, told to the runner as bitmasks.

A matcher's state is that of the ids that were settled. Masks for a step are made once the row's older steps have
settled; drafts are walked for that and rolled back, so that only `advance` moves a matcher for good. Ids that an output
has already when its matcher is made are walked where that is made, never in the engine's loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import Event
from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Sequence
from photon_grpc.errors import FeatureNotSupported, InternalFailure, InvalidConstraint, RequestError

_LOG = logging.getLogger(__name__)


class Matcher(Protocol):
    """The state of one output under its constraint. What a method raises ends that output, but for MatcherLost."""

    def fill(self, mask: memoryview) -> None:
        """Overwrite the bitmask (layout: core.ports.Pending.sample) with the ids that may follow; an end of sequence
        where one may."""

    def accept(self, token_id: int) -> bool:
        """Move on by one id. False, and nothing moved, when it may not follow."""

    def advance(self, token_id: int) -> bool:
        """Return the same for good. False, and the matcher of no more use, when the id may not follow."""

    def roll_back(self, num_tokens: int) -> None:
        """Undoes so many `accept`s."""

    @property
    def is_complete(self) -> bool:
        """True when nothing but the end may follow."""


class MaskFiller(Protocol):
    """Fills masks of the same matchers in one step after the other."""

    def fill(self, masks: memoryview) -> Mapping[int, BaseException]:
        """Every matcher's `fill`, into the bitmask of its number among `masks`; what they raised, by those numbers."""


class MatcherLost(Exception):
    """A matcher is of no more use, through no fault of its output: it is to be made again from the output's ids."""


class Preparation(Protocol):
    """The matchers of one request, which may take another thread long to make."""

    def awaits(self) -> Event | None:
        """Return the event that must come before `matchers` may be called, None where it may be now. The other thread
        wakes the engine with it (core.ports.Inbox.wake)."""

    def matchers(self, num: int) -> Iterable[Matcher]:
        """Return `num` matchers, one for each output. What it raises ends the request."""

    def cancel(self) -> None:
        """Drop the work: its request has ended."""


class Grammars(Protocol):
    """Makes matchers. What a method raises refuses the request."""

    def prepare(self, request: Request, ids: tuple[int, ...], is_anew: bool) -> Preparation | None:
        """Return the matchers of a request; None where it has no constraint.

        Args:
            ids: that its only output has; () where outputs begin.
            is_anew: the matcher that walked these ids was lost.
        """

    def filler(self, matchers: Mapping[int, Matcher], mask_bytes: int) -> MaskFiller:
        """For as long as these matchers' outputs are alive.

        Args:
            matchers: this object's own, at least one, by the numbers of their masks.
            mask_bytes: of one mask.
        """


class NoGrammars:
    """No request may have a constraint."""

    def prepare(self, request: Request, ids: tuple[int, ...], is_anew: bool) -> None:
        if request.constraint is not None:
            raise FeatureNotSupported("structured_output: this model has no tokenizer that grammars know")

    def filler(self, matchers: Mapping[int, Matcher], mask_bytes: int) -> MaskFiller:
        raise NotImplementedError("there are no matchers")


class MaskMemory:
    """Memory of steps' masks, used in turn.

    Args:
        num_steps: whose masks may be in use at a time.
        allocate: so many bytes.
    """

    def __init__(self, num_steps: int = 1, allocate: Callable[[int], memoryview] | None = None) -> None:
        self._allocate = allocate or _allocate
        self._turn = deque(memoryview(b"") for _ in range(num_steps))

    def next(self, num_bytes: int) -> memoryview:
        """Of this size, from `num_steps` calls ago where it is large enough: with what lay there then."""
        memory = self._turn.popleft()
        if len(memory) < num_bytes:
            memory = self._allocate(max(num_bytes, 2 * len(memory)))
        self._turn.append(memory)
        return memory[:num_bytes]


class MaskedRows:
    """The masked rows of a step, and of those behind it that have the same.

    Args:
        seqs: theirs, in order.
        num_masks: of each.
        matchers: of those that have one, by the number of their first mask.
    """

    def __init__(self, seqs: list[Sequence], num_masks: int, matchers: dict[int, Matcher]) -> None:
        self.seqs = seqs
        self.num_masks = num_masks
        self.matchers = matchers
        self._filler: MaskFiller | None = None

    def fill(self, grammars: Grammars, masks: memoryview, mask_bytes: int) -> Mapping[int, BaseException]:
        """Fill the first mask of every matcher; what went wrong, by their numbers."""
        try:
            if self._filler is None and self.matchers:
                self._filler = grammars.filler(self.matchers, mask_bytes)
            return self._filler.fill(masks) if self._filler is not None else {}
        except BaseException as error:
            return dict.fromkeys(self.matchers, error)


class ConstrainedOutputs:
    """The matchers of the sequences that are alive.

    Args:
        grammars: makes matchers.
        vocab_size: ids that a bitmask speaks of.
        memory: for the masks of the steps that may be unread at a time.
    """

    def __init__(self, grammars: Grammars, vocab_size: int, memory: MaskMemory | None = None) -> None:
        self._grammars = grammars
        self._mask_bytes = 4 * -(-vocab_size // 32)
        self._memory = memory or MaskMemory()
        #: Constrained sequences only, from `begin` to `forget`.
        self.matchers: dict[Sequence, Matcher] = {}
        #: Of requests whose matchers are being made, by their first sequence.
        self._preparations: dict[Sequence, Preparation] = {}
        #: Of the last step, until an output begins or ends. Holds nothing but what is alive.
        self._masked: MaskedRows | None = None

    def begin(self, seqs: list[Sequence]) -> Event | None:
        """Give the sequences of one request their matchers, or returns the event after which it is to be called again.
        Raises RequestError."""
        request, first = seqs[0].request, seqs[0]
        return self._prepared(seqs, lambda: self._grammars.prepare(request, first.request.continued_ids, False))

    def begin_anew(self, seq: Sequence) -> Event | None:
        """Return the same for a sequence whose matcher was lost, behind the ids of its output."""
        if self.matchers.pop(seq, None) is not None:
            self._masked = None
        ids = tuple(seq.ids[seq.num_prompt :])
        return self._prepared([seq], lambda: self._grammars.prepare(seq.request, ids, True))

    def _prepared(self, seqs: list[Sequence], prepare: Callable[[], Preparation | None]) -> Event | None:
        try:
            preparation = self._preparations.pop(seqs[0], None) or prepare()
            if preparation is None:
                return None
            event = preparation.awaits()
            if event is not None:
                self._preparations[seqs[0]] = preparation
                return event
            self.matchers.update(zip(seqs, preparation.matchers(len(seqs)), strict=True))
            self._masked = None
        except BaseException as error:
            raise _fit_for_caller(error) from error
        return None

    def forget(self, seq: Sequence) -> None:
        if self.matchers.pop(seq, None) is not None:
            self._masked = None
        preparation = self._preparations.pop(seq, None)
        # Other outputs of the request may wait for it.
        if preparation is not None and seq.request.num_outputs == 1:
            preparation.cancel()

    def close(self) -> None:
        """Drop the work that sequences still wait for."""
        for preparation in self._preparations.values():
            preparation.cancel()
        self._preparations.clear()

    @property
    def is_empty(self) -> bool:
        """Return whether `forget` has nothing to do."""
        return not (self.matchers or self._preparations)

    def advance(self, seq: Sequence, token_id: int) -> bool:
        """Move a sequence's matcher on by a drawn id. Returns whether its output is complete. Raises MatcherLost, and
        RequestError when the matcher fails or says that the id may not follow."""
        matcher = self.matchers[seq]
        try:
            if not matcher.advance(token_id):
                raise ValueError(f"id {token_id} was drawn though the constraint does not allow it")
            return matcher.is_complete
        except MatcherLost:
            raise
        except BaseException as error:
            raise _fit_for_caller(error) from error

    def masks(
        self, batch: Batch, rows: list[Sequence], drafts: tuple[int, ...]
    ) -> tuple[memoryview, dict[Sequence, RequestError | MatcherLost]]:
        """Return the bitmasks of the batch's masked rows as `core.ports.Pending.sample` takes them, in memory that
        comes round again, and why matchers failed. All ones where a sequence has ended, where its matcher fails, and
        behind a draft that ends the output or may not follow.

        Args:
            batch: its rows are `rows`.
            drafts: as `core.ports.Pending.drafts` gives them.
        """
        k = batch.drafts
        stride = (k + 1) * self._mask_bytes
        masks = self._memory.next(len(batch.masked) * stride)
        masked = self._masked_rows([rows[row] for row in batch.masked], k + 1)
        if k or len(masked.matchers) < len(masked.seqs):
            masks[:] = b"\xff" * len(masks)
        broken = masked.fill(self._grammars, masks, self._mask_bytes)
        failures: dict[Sequence, RequestError | MatcherLost] = {}
        for first in masked.matchers if k or broken else ():
            at = first // (k + 1)
            seq, mine = masked.seqs[at], masks[at * stride : (at + 1) * stride]
            try:
                if first in broken:
                    raise broken[first]
                if k:
                    self._walk(seq, drafts[at * k : at * k + batch.yields[batch.masked[at]] - 1], mine)
            except BaseException as error:
                failures[seq] = error if isinstance(error, MatcherLost) else _fit_for_caller(error)
                mine[:] = b"\xff" * stride
        return masks, failures

    def _masked_rows(self, seqs: list[Sequence], num_masks: int) -> MaskedRows:
        kept = self._masked
        if kept is None or kept.seqs != seqs or kept.num_masks != num_masks:
            pairs = enumerate(map(self.matchers.get, seqs))
            matchers = {at * num_masks: matcher for at, matcher in pairs if matcher is not None}
            kept = MaskedRows(seqs, num_masks, matchers)
            self._masked = kept if len(matchers) == len(seqs) else None
        return kept

    def _walk(self, seq: Sequence, drafts: tuple[int, ...], masks: memoryview) -> None:
        """Walk the drafts behind the first mask, one mask for each state on the way, and back."""
        matcher, size = self.matchers[seq], self._mask_bytes
        num_walked = 0
        for draft in drafts:
            if draft in seq.stop_ids or not matcher.accept(draft):
                break
            num_walked += 1
            if matcher.is_complete:
                break
            matcher.fill(masks[num_walked * size : (num_walked + 1) * size])
        if num_walked:
            matcher.roll_back(num_walked)


def _allocate(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


def nothing_to_sample(request: Request) -> InvalidConstraint:
    """Names the fields of the request that may have left no id."""
    fields = [
        name
        for name, is_set in (
            (_field(request), request.constraint is not None),
            ("sampling.allowed_token_ids", bool(request.sampling.allowed_token_ids)),
            ("stop.min_tokens", bool(request.stop.min_tokens)),
        )
        if is_set
    ]
    return InvalidConstraint(f"{' and '.join(fields)} leave no id that may be drawn", field=next(iter(fields), ""))


def _field(request: Request) -> str:
    return "structured_output" if request.constraint is None else request.constraint.field


def _fit_for_caller(error: BaseException) -> RequestError:
    """Raise what is meant for the process. All else ends one request: a panic in a matcher written in Rust comes as a
    BaseException that is no Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    if not isinstance(error, RequestError):
        _LOG.error("a constraint failed", exc_info=error)
    # Its frames hold the step's matchers, and through them their lexers, until the collector comes.
    error.__traceback__ = None
    if isinstance(error, RequestError):
        return error
    return InternalFailure("internal error in the constraint of this request")
