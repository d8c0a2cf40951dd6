"""The number of drafts that makes most tokens a second, by what was measured."""

from __future__ import annotations

from collections.abc import Callable

from photon_grpc.core.batch import Batch
from photon_grpc.core.sequence import Sequence

#: Steps of one kind before one is measured: those before it are still in flight beside it.
_SETTLED = 3
#: Weight of a new duration, and of what was known of acceptance before another draft.
_NEW, _KEPT = 0.2, 0.98
#: The share of right drafts that is assumed before any is known.
_ASSUMED_SHARE, _ASSUMED_WEIGHT = 0.7, 4.0
#: A step that was never measured is assumed to cost so much more for each draft than one without, beside what it reads.
_ASSUMED_COST = 0.03
#: Steps between two probes, of as many steps each: while nothing is drafted, first and at most; while something is.
_FIRST_PROBE, _LAST_PROBE, _PLAIN_PROBE, _PROBE_STEPS = 64, 1024, 256, 2 + _SETTLED
#: The share of the time that probes of drafts may cost.
_PROBE_COST = 0.005
#: Steps of more tokens have no CUDA graph: they draft nothing, and none is probed.
_MOST_TOKENS = 256
#: A gain below this is not worth it.
_LEAST_GAIN = 1.03
#: A row drafts nothing while its share is below the first, once it had so many drafts; it tries again every so many
#: steps.
_LEAST_SHARE, _LEAST_TRIED, _TRY_AGAIN = 0.1, 16.0, 64


class AdaptiveDrafting:
    """Drafts as many tokens of a row as pay, or none.

    The gain of k is the tokens that a row of a step with k is expected to yield over the measured time of such a step.
    The first come of the share of drafts that were right, each given that those before it were; the second of steps
    with as many rows, in powers of two. Where nothing pays, a few steps draft one token now and then; where something
    does, a few draft none. No step drafts beside prompts, or while some wait.

    Args:
        counts: the numbers of drafts to choose from, ascending, without 0.
        step_bytes: tokens of a step -> bytes of weights that it reads, for steps that were never measured: where there
            are experts, more tokens read more of them.
    """

    def __init__(self, counts: tuple[int, ...], step_bytes: Callable[[int], float] = lambda num_tokens: 1.0) -> None:
        self._counts = counts
        self._step_bytes = step_bytes
        #: (power of two of the rows, k) -> seconds of a step.
        self._step_s: dict[tuple[int, int], float] = {}
        self._share = _Share()
        #: Sequence -> its share, and steps until it tries again.
        self._of: dict[Sequence, _Share] = {}
        self._last: tuple[int, int] = (0, 0)
        self._num_alike = self._chosen = self._left_of_probe = 0
        self._until_probe = _FIRST_PROBE
        self._pause = _FIRST_PROBE

    def num_drafts(self, num_running: int, has_prompts: Callable[[], bool]) -> int:
        best = self._most_gained(num_running)
        # A step of prompts is long whatever it yields, and its shapes are those without drafts.
        return 0 if best and has_prompts() else best

    def prepares(self, num_running: int) -> bool:
        # Beside more nothing is drafted, and those of them that are left later draft with what they have.
        return num_running * (1 + self._counts[0]) <= _MOST_TOKENS

    def _most_gained(self, num_running: int) -> int:
        bucket = num_running.bit_length()
        counts = [k for k in self._counts if num_running * (1 + k) <= _MOST_TOKENS]
        if (bucket, 0) not in self._step_s or not counts:
            return 0
        best = self._best(bucket, counts)
        if best != self._chosen:
            self._chosen = best
            self._pause = self._until_probe = _PLAIN_PROBE if best else _FIRST_PROBE
            self._left_of_probe = 0
        return self._probed(best, bucket)

    def of(self, seq: Sequence, k: int) -> int:
        most = min(seq.request.max_drafts, k)
        share = self._of.get(seq)
        if share is None or not share.is_hopeless:
            return most
        share.num_waited += 1
        return min(most, 1) if share.num_waited % _TRY_AGAIN == 0 else 0

    def kept(self, seq: Sequence, num_drafts: int, num_right: int) -> None:
        if num_drafts:
            if seq not in self._of:
                self._forget_ended()
                self._of[seq] = _Share()
            for share in (self._share, self._of[seq]):
                share.tried(num_drafts, num_right)

    def stepped(self, batch: Batch, duration_s: float) -> None:
        if batch.admissions or batch.counts != batch.yields or duration_s <= 0.0:
            self._num_alike = 0
            return
        kind = len(batch.slots).bit_length(), batch.drafts
        self._num_alike = self._num_alike + 1 if kind == self._last else 1
        self._last = kind
        if self._num_alike >= _SETTLED:
            before = self._step_s.get(kind, duration_s)
            self._step_s[kind] = before + _NEW * (duration_s - before)

    def _best(self, bucket: int, counts: list[int]) -> int:
        best, most = 0, _LEAST_GAIN / (plain_s := self._step_s[bucket, 0])
        for k in counts:
            step_s = plain_s * self._ratio(bucket, k)
            # One measured as shorter than a plain step is old: the machine was less busy then.
            gain = self._share.expected(k) / max(step_s, plain_s)
            if gain > most:
                best, most = k, gain
        return best

    def _ratio(self, bucket: int, k: int) -> float:
        """Return the time of a step with k drafts over that of one without: measured, or assumed by its neighbours."""
        measured = self._measured(bucket, k)
        if measured:
            return measured
        rows = 1 << (bucket - 1)
        read = self._step_bytes(rows * (1 + k)) / self._step_bytes(rows)
        assumed = max(1.0, read) * (1.0 + _ASSUMED_COST * k)
        alike = [1.0 + (each - 1.0) * k / other for other in self._counts if (each := self._measured(bucket, other))]
        # Drafts of fewer rows cost no larger share of a step.
        fewer = (self._measured(less, k) for less in range(bucket - 1, 0, -1))
        return max(assumed, min(alike, default=0.0), next((each for each in fewer if each), 0.0))

    def _measured(self, bucket: int, k: int) -> float:
        """Return the time of a step with k drafts over that of one without; 0: it was never measured."""
        plain_s = self._step_s.get((bucket, 0))
        return self._step_s.get((bucket, k), 0.0) / plain_s if plain_s else 0.0

    def _probed(self, best: int, bucket: int) -> int:
        """Return `best`, or what is probed instead."""
        if self._left_of_probe:
            self._left_of_probe -= 1
            return 0 if best else self._counts[0]
        self._until_probe -= 1
        if self._until_probe <= 0:
            # Without success pauses grow.
            self._pause = _PLAIN_PROBE if best else min(2 * max(self._pause, self._cheap_pause(bucket)), _LAST_PROBE)
            self._until_probe, self._left_of_probe = self._pause, _PROBE_STEPS
        return best

    def _cheap_pause(self, bucket: int) -> int:
        """Return the steps between probes of one draft that cost no more than they may."""
        plain_s, least = self._step_s[bucket, 0], self._counts[0]
        return int(_PROBE_STEPS * (self._step_s.get((bucket, least), plain_s) / plain_s - 1.0) / _PROBE_COST)

    def _forget_ended(self) -> None:
        if len(self._of) > 64 and len(self._of) > 2 * sum(seq.slot > 0 for seq in self._of):
            self._of = {seq: share for seq, share in self._of.items() if seq.slot}


class AdaptiveForcedDrafting(AdaptiveDrafting):
    """As many tokens of a row as pay, of those that its constraint leaves no choice about, and no others.

    In a step with drafts a row without counts as one whose draft was wrong: its step is longer, too.
    """

    def of(self, seq: Sequence, k: int) -> int:
        return 0

    def kept(self, seq: Sequence, num_drafts: int, num_right: int) -> None:
        self._share.tried(max(num_drafts, 1), num_right)


class _Share:
    """The share of drafts that were right, given that those before them were; old ones count less."""

    __slots__ = ("_right", "_tried", "num_waited")

    def __init__(self) -> None:
        self._right, self._tried = _ASSUMED_SHARE * _ASSUMED_WEIGHT, _ASSUMED_WEIGHT
        self.num_waited = 0

    def tried(self, num_drafts: int, num_right: int) -> None:
        # Those behind a wrong one say nothing.
        kept = _KEPT ** (1 + num_right)
        self._right = kept * self._right + num_right
        self._tried = kept * self._tried + min(num_right + 1, num_drafts)

    @property
    def is_hopeless(self) -> bool:
        return self._tried >= _LEAST_TRIED and self._right < _LEAST_SHARE * self._tried

    def expected(self, k: int) -> float:
        """Return the ids that a row with k drafts is expected to yield."""
        share = self._right / self._tried
        return sum(share**at for at in range(k + 1))
