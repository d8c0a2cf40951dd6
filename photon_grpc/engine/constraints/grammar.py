"""Constrained outputs: the bitmasks of ids that may follow, for the runner.

A matcher's state is that after the settled ids. The masks of a step are made once the older steps of a row have
settled. Drafts are walked for that and rolled back, so that only `advance` moves a matcher permanently. Ids that an
output already has when its matcher is made are walked where the matcher is made, never in the engine's loop.
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
    """The state of one output under its constraint. Any exception but MatcherLost ends that output."""

    def fill(self, mask: memoryview) -> None:
        """Overwrite the bitmask with the ids that may follow, ends included (layout: core.ports.Pending.sample)."""

    def accept(self, token_id: int) -> bool:
        """Move on by one id. Return False, without moving, if it may not follow."""

    def advance(self, token_id: int) -> bool:
        """Move on by one id permanently. Return False, after which the matcher is unusable, if it may not follow."""

    def roll_back(self, num_tokens: int) -> None:
        """Undo this many calls of `accept`."""

    def forced(self) -> tuple[int, ...]:
        """Return ids of the only text that may follow, as far as there is one; others may spell it, too."""

    @property
    def is_complete(self) -> bool:
        """Whether only an end may follow."""


class MaskFiller(Protocol):
    """Fills the masks of the same matchers in successive steps."""

    def fill(self, masks: memoryview) -> Mapping[int, BaseException]:
        """Call `fill` of every matcher with its numbered bitmask; return the exceptions by number."""


class MatcherLost(Exception):
    """A matcher became unusable through no fault of its output, and must be made again from the output's ids."""


class Preparation(Protocol):
    """The matchers of one request, which another thread may take long to make."""

    def awaits(self) -> Event | None:
        """Return the event that must happen before `matchers` is called; None if it may be called now.

        The other thread wakes the engine with it (core.ports.Inbox.wake).
        """

    def matchers(self, num: int) -> Iterable[Matcher]:
        """Return `num` matchers, one for each output. To be called once. An exception ends the request."""

    def cancel(self) -> None:
        """Drop the work for a request that has ended."""


class Grammars(Protocol):
    """Makes matchers. An exception refuses the request."""

    def prepare(self, request: Request, ids: tuple[int, ...], is_anew: bool) -> Preparation | None:
        """Return the matchers of a request; None if it has no constraint.

        Args:
            request: the request.
            ids: the ids that its only output already has, or ().
            is_anew: the matcher that had walked these ids was lost.
        """

    def filler(self, matchers: Mapping[int, Matcher], mask_bytes: int) -> MaskFiller:
        """Return a filler for as long as the outputs of these matchers are alive.

        Args:
            matchers: at least one matcher made by this object, by the number of its mask.
            mask_bytes: size of one mask.
        """


class NoGrammars:
    """Refuses every constraint."""

    def prepare(self, request: Request, ids: tuple[int, ...], is_anew: bool) -> None:
        if request.constraint is not None:
            raise FeatureNotSupported("structured_output: grammars do not support this model's tokenizer")

    def filler(self, matchers: Mapping[int, Matcher], mask_bytes: int) -> MaskFiller:
        raise NotImplementedError("there are no matchers")


class MaskMemory:
    """Memory for the masks of steps, used in turn.

    Args:
        num_steps: number of steps whose masks may be in use at a time.
        allocate: allocates this many bytes.
    """

    def __init__(self, num_steps: int = 1, allocate: Callable[[int], memoryview] | None = None) -> None:
        self._allocate = allocate or _allocate
        self._turn = deque(memoryview(b"") for _ in range(num_steps))

    def next(self, num_bytes: int) -> memoryview:
        """Return memory of this size with arbitrary content, reusing that of `num_steps` calls ago if it suffices."""
        memory = self._turn.popleft()
        if len(memory) < num_bytes:
            memory = self._allocate(max(num_bytes, 2 * len(memory)))
        self._turn.append(memory)
        return memory[:num_bytes]


class MaskedRows:
    """The masked rows of a step, and of later steps with the same rows.

    Args:
        seqs: their sequences, in order.
        num_masks: masks per sequence.
        matchers: the matchers of sequences that have one, by the number of their first mask.
    """

    def __init__(self, seqs: list[Sequence], num_masks: int, matchers: dict[int, Matcher]) -> None:
        self.seqs = seqs
        self.num_masks = num_masks
        self.matchers = matchers
        self._filler: MaskFiller | None = None

    def fill(self, grammars: Grammars, masks: memoryview, mask_bytes: int) -> Mapping[int, BaseException]:
        """Fill the first mask of every matcher; return the exceptions by mask number."""
        try:
            if self._filler is None and self.matchers:
                self._filler = grammars.filler(self.matchers, mask_bytes)
            return self._filler.fill(masks) if self._filler is not None else {}
        except BaseException as error:
            return dict.fromkeys(self.matchers, error)


class ConstrainedOutputs:
    """The matchers of live sequences.

    Args:
        grammars: makes matchers.
        vocab_size: number of ids in a bitmask.
        memory: for the masks of all steps that may be unread at a time.
    """

    def __init__(self, grammars: Grammars, vocab_size: int, memory: MaskMemory | None = None) -> None:
        self._grammars = grammars
        self._mask_bytes = 4 * -(-vocab_size // 32)
        self._memory = memory or MaskMemory()
        #: The matchers of constrained sequences, from `begin` to `forget`.
        self.matchers: dict[Sequence, Matcher] = {}
        #: First sequence of a request -> its matchers that are being made.
        self._preparations: dict[Sequence, Preparation] = {}
        #: Sequence with a matcher -> its length, and what follows there without a choice.
        self._forced: dict[Sequence, tuple[int, tuple[int, ...]]] = {}
        #: The masked rows of the last step, until an output begins or ends. Holds only live sequences.
        self._masked: MaskedRows | None = None

    def begin(self, seqs: list[Sequence]) -> Event | None:
        """Give the sequences of one request their matchers, or return an event after which to call this again.

        Raise RequestError.
        """
        request, first = seqs[0].request, seqs[0]
        return self._prepared(seqs, lambda: self._grammars.prepare(request, first.request.continued_ids, False))

    def begin_anew(self, seq: Sequence) -> Event | None:
        """Do the same for a sequence whose matcher was lost, with a matcher after the ids of its output."""
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
            raise _request_error(error) from error
        return None

    def forget(self, seq: Sequence) -> None:
        self._forced.pop(seq, None)
        if self.matchers.pop(seq, None) is not None:
            self._masked = None
        preparation = self._preparations.pop(seq, None)
        # Other outputs of the request may still wait for it.
        if preparation is not None and seq.request.num_outputs == 1:
            preparation.cancel()

    def close(self) -> None:
        """Drop the work that sequences still wait for."""
        for preparation in self._preparations.values():
            preparation.cancel()
        self._preparations.clear()

    @property
    def is_empty(self) -> bool:
        """Whether `forget` has nothing to do."""
        return not (self.matchers or self._preparations)

    def advance(self, seq: Sequence, token_id: int) -> bool:
        """Move a sequence's matcher on by a sampled id; return whether its output is complete.

        Raise MatcherLost, and RequestError if the matcher fails or does not allow the id.
        """
        matcher = self.matchers[seq]
        try:
            if not matcher.advance(token_id):
                raise ValueError(f"id {token_id} was sampled though the constraint does not allow it")
            return matcher.is_complete
        except MatcherLost:
            raise
        except BaseException as error:
            raise _request_error(error) from error

    def forced(self, seq: Sequence) -> tuple[int, ...]:
        """Return ids that probably follow the settled ones, because the constraint leaves no choice; often none.

        What fails here fails again when masks are made.
        """
        length, ids = self._forced.get(seq, (-1, ()))
        if length != len(seq.ids):
            try:
                ids = self.matchers[seq].forced()
            except BaseException as error:
                _request_error(error)
                ids = ()
            self._forced[seq] = len(seq.ids), ids
        return ids

    def masks(
        self, batch: Batch, rows: list[Sequence], drafts: tuple[int, ...]
    ) -> tuple[memoryview, dict[Sequence, RequestError | MatcherLost]]:
        """Return the bitmasks of the batch's masked rows for `core.ports.Pending.sample`, and why matchers failed.

        A mask is all ones if its sequence has ended, if its matcher fails, or after a draft that ends the output or may
        not follow. The memory of the masks is reused.

        Args:
            batch: the batch.
            rows: its sequences.
            drafts: the result of `core.ports.Pending.drafts`.
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
                failures[seq] = error if isinstance(error, MatcherLost) else _request_error(error)
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
        """Walk the drafts, fill a mask after each, and roll back."""
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
    """Return an error that names the fields of the request that may have left no id."""
    fields = [
        name
        for name, is_set in (
            (_field(request), request.constraint is not None),
            ("sampling.allowed_token_ids", bool(request.sampling.allowed_token_ids)),
            ("stop.min_tokens", bool(request.stop.min_tokens)),
        )
        if is_set
    ]
    return InvalidConstraint(f"{' and '.join(fields)} leave no id that may be sampled", field=next(iter(fields), ""))


def _field(request: Request) -> str:
    return "structured_output" if request.constraint is None else request.constraint.field


def _request_error(error: BaseException) -> RequestError:
    """Return the error that ends the request; raise exceptions that end the process.

    A panic in a matcher written in Rust is a BaseException that is not an Exception.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    if not isinstance(error, RequestError):
        _LOG.error("a constraint failed", exc_info=error)
    # The frames would hold the matchers of the step, and so their lexers, until garbage is collected.
    error.__traceback__ = None
    if isinstance(error, RequestError):
        return error
    return InternalFailure("internal error in the constraint of this request")
