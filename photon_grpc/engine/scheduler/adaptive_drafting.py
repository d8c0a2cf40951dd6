"""The number of drafts that makes most tokens a second, by what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable

from photon_grpc.core.batch import Batch
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.scheduler.step_costs import DraftCost, Kind, StepCosts, counts_with_shape, rows_of_shape

#: The share of right drafts that is assumed before any is known, and the drafts that this weighs.
_ASSUMED_SHARE, _ASSUMED_WEIGHT = 0.5, 1.0
#: Drafts that a share is made of: of one row, and of a step's rows at least so many steps.
_REMEMBERED, _REMEMBERED_STEPS = 50, 8
#: The gain from which on steps draft: where the cost of such a step was measured, where it is assumed, and where they
#: draft already. Another number of drafts gains so much more than the present one.
_GAIN_MEASURED, _GAIN_ASSUMED, _GAIN_KEPT, _GAIN_OTHER = 1.15, 1.20, 1.10, 1.03
#: The share of the time without drafts that may be lost by trying some: at first, and after many tries in vain.
_FIRST_LOSS, _LEAST_LOSS = 0.01, 0.001
#: Steps of a probe at most, and the steps without drafts that it may cost.
_PROBE_STEPS, _PROBE_COST = 4, 0.8
#: Nothing is chosen before so many drafts of probes are known.
_LEAST_KNOWN = 4.0
#: Steps between two probes of drafts at least, and between two of steps without, which keep their cost up to date.
_PROBE_PAUSE, _PLAIN_PAUSE = 32, 256
#: Steps without drafts that may have been gained or lost, on balance, while others draft.
_MOST_GAINED, _MOST_LOST = 6.0, 0.5
#: No debt is larger, and a step that was never measured counts as at most so many without drafts.
_MOST_OWED, _MOST_COUNTED = 2.0, 4.0
#: A step with drafts counts as at most so many times what is known of it: longer ones waited for something else.
_LONGEST = 1.5
#: A row drafts nothing while its share is below the first, once it had so many drafts; it tries again every so many
#: steps.
_LEAST_SHARE, _LEAST_TRIED, _TRY_AGAIN = 0.1, 16.0, 64
#: One of so many sequences has its prompt computed by the drafter: where drafts are not expected to pay (at most ten
#: times as many sequences, after many tries in vain), and while that is not known.
_PREPARED_PART, _PREPARED_FIRST = 8, 4


class AdaptiveDrafting:
    """Drafts as many tokens of a row as pay, or none.

    The gain of k is the tokens that a row of a step with k is expected to yield, over the time of such a step beside
    one without drafts (StepCosts). The tokens come of the share of drafts that were right, each given that those before
    it were. No step drafts beside prompts, or while some wait.

    Whatever is assumed, little is lost: an account holds a small share of the time of steps without drafts. A few
    steps that probe a draft must be covered by it. What such steps lose in fact is taken from it, by the wall
    time of steps and the tokens that they yielded; nothing is drafted while it is overdrawn.

    Args:
        counts: the numbers of drafts to choose from, ascending, without 0.
        step_bytes: tokens of a step -> bytes of weights that it reads, for steps that were never measured: where there
            are experts, more tokens read more of them.
        making: what making drafts is assumed to cost; nothing: prompts do not matter to the drafter either.
        clock: seconds.
    """

    def __init__(
        self,
        counts: tuple[int, ...],
        step_bytes: Callable[[int], float] = lambda num_tokens: 1.0,
        making: DraftCost = DraftCost(),  # noqa: B008
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._counts = counts
        self._costs = StepCosts(step_bytes, making, clock)
        self._needs_prompts = making != DraftCost()
        #: Of all rows, and of those whose prompts the drafter has computed.
        self._share, self._prepared_share = _Share(), _Share()
        #: Sequence -> its share, and steps until it tries again.
        self._of: dict[Sequence, _Share] = {}
        #: Sequences whose prompts the drafter has computed, where it needs that.
        self._prepared: set[Sequence] = set()
        self._num_unprepared = 0
        self._chosen = 0
        #: k of the step planned last, and of the one read last; right drafts of the one being read.
        self._planned = self._read = self._num_right = 0
        #: Whether the time of the step read last is known.
        self._is_timed = False
        #: Seconds that may be lost, what they grow by for each second without drafts, and their limit.
        self._account_s = self._limit_s = 0.0
        self._growth = _FIRST_LOSS
        #: Steps that are left of a probe, its k, and steps until the next one.
        self._left_of_probe = self._probed = 0
        self._until_probe = _PROBE_PAUSE
        #: Of the steps around a probe: seconds beyond those of plain ones, steps with drafts, and the kind of these.
        self._excess_s, self._num_drafted, self._probed_kind = 0.0, 0, Kind(0, 0)

    def num_drafts(self, num_running: int, has_prompts: Callable[[], bool]) -> int:
        wanted = self._wanted(num_running)
        # A step of prompts is long whatever it yields, and its shapes are those without drafts.
        if wanted and has_prompts():
            # A probe beside them would tell nothing.
            wanted = self._left_of_probe = self._until_probe = 0
        elif self._left_of_probe:
            self._left_of_probe -= 1
        self._planned = wanted
        return wanted

    def computes_prompt(self, seq: Sequence, num_running: int) -> bool:
        if not self._needs_prompts:
            return True
        # Beside more nothing is drafted, and those of them that are left later draft with what they have.
        counts = counts_with_shape(num_running, self._counts)
        is_prepared = bool(counts) and (self._num_unprepared == 0 or self._pays(num_running, counts))
        is_known = self._prepared_share.is_known
        part = round(_PREPARED_PART * _FIRST_LOSS / self._growth) if is_known else _PREPARED_FIRST
        self._num_unprepared = (self._num_unprepared + 1) % part
        if len(self._prepared) > 2 * num_running:
            self._prepared = {each for each in self._prepared if each.slot}
        (self._prepared.add if is_prepared else self._prepared.discard)(seq)
        return is_prepared

    def of(self, seq: Sequence, k: int) -> int:
        most = min(seq.request.max_drafts, k)
        share = self._of.get(seq)
        if share is None or not share.is_hopeless:
            return most
        share.num_waited += 1
        return min(most, 1) if share.num_waited % _TRY_AGAIN == 0 else 0

    def kept(self, seq: Sequence, num_drafts: int, num_right: int) -> None:
        self._num_right += num_right
        if num_drafts:
            if seq not in self._of:
                self._forget_ended()
                self._of[seq] = _Share()
            for share in (self._of[seq], self._share):
                share.tried(num_drafts, num_right)
            if seq in self._prepared:
                self._prepared_share.tried(num_drafts, num_right)

    def stepped(self, batch: Batch, duration_s: float) -> None:
        num_rows, num_right, self._num_right = len(batch.slots), self._num_right, 0
        kind = None
        if not batch.admissions and batch.counts == batch.yields and duration_s > 0.0:
            kind = Kind(rows_of_shape(num_rows), batch.drafts)
        for share in (self._share, self._prepared_share):
            share.remembered = max(_REMEMBERED, _REMEMBERED_STEPS * num_rows)
        took_s = self._costs.stepped(batch, kind)
        is_plain, self._read = not (batch.drafts or self._read or self._planned), batch.drafts
        self._is_timed = took_s > 0.0
        plain_s = self._costs.near_plain_s(kind.rows) if kind else 0.0
        if kind is None or not took_s or not plain_s:
            self._num_drafted, self._excess_s = 0, 0.0
        elif is_plain:
            self._end_probe()
            self._account_s = min(self._account_s + self._growth * min(took_s, 2 * plain_s), self._limit_s)
        else:
            # A step without drafts beside one with them waits for its launches.
            is_known = batch.drafts and self._costs.is_measured(kind)
            longest = _LONGEST * self._costs.ratio(kind) if is_known else _MOST_COUNTED
            excess_s = min(took_s, longest * plain_s) - plain_s
            self._account_s += plain_s * num_right / num_rows - excess_s
            self._account_s = max(min(self._account_s, self._limit_s), -_MOST_OWED * plain_s)
            if batch.drafts:
                self._num_drafted += 1
                self._probed_kind = kind
            self._excess_s += excess_s

    def _end_probe(self) -> None:
        """Learn the cost of a probe that was too short for a step between others of its kind; spend less on others."""
        if self._num_drafted and self._share.is_known and not self._chosen:
            self._growth = max(self._growth / 2, _LEAST_LOSS)
        if 0 < self._num_drafted < 3:
            kind = self._probed_kind
            plain_s = self._costs.near_plain_s(kind.rows)
            self._costs.learn_probe(kind, plain_s + max(self._excess_s, 0.0) / self._num_drafted)
        self._num_drafted, self._excess_s = 0, 0.0

    def _wanted(self, num_running: int) -> int:
        rows, counts = rows_of_shape(num_running), counts_with_shape(num_running, self._counts)
        # What drafts goes on when some rows have ended, and their number is a new one.
        plain_s = self._costs.near_plain_s(rows) if self._chosen else self._costs.plain_s(rows)
        if not counts or not plain_s:
            self._left_of_probe = 0
            return 0
        if self._left_of_probe:
            return min(self._probed, counts[-1])
        best = self._best(rows, counts, self._share)
        if self._chosen:
            if self._account_s >= self._limit_s:
                self._growth = _FIRST_LOSS
            if not best or self._account_s < -_MOST_LOST * plain_s:
                self._chosen, self._until_probe = 0, _PROBE_PAUSE
                self._growth = max(self._growth / 2, _LEAST_LOSS)
        elif best and self._account_s >= 0.0:
            self._chosen, self._until_probe = best, _PLAIN_PAUSE
        self._until_probe -= 1
        if not self._chosen:
            return self._probe_of_drafts(num_running, counts[0], plain_s)
        self._chosen = best
        self._limit_s = _MOST_GAINED * plain_s
        if self._until_probe <= 0:
            self._until_probe, self._left_of_probe, self._probed = _PLAIN_PAUSE, _PROBE_STEPS, 0
            return 0
        return best

    def _probe_of_drafts(self, num_running: int, k: int, plain_s: float) -> int:
        """Return k at the begin of a probe, 0 while the account does not cover one."""
        loss = self._costs.ratio(Kind(rows_of_shape(num_running), k)) - 1.0
        num_steps = max(1, min(_PROBE_STEPS, int(_PROBE_COST / loss) if loss > 0.0 else _PROBE_STEPS))
        loss_s = num_steps * loss * plain_s
        # Nothing more is saved, so that no short time has two of them.
        self._limit_s = loss_s
        if self._until_probe > 0 or self._account_s < loss_s or not self._is_timed or not self._tells():
            return 0
        self._until_probe, self._left_of_probe, self._probed = _PROBE_PAUSE, num_steps, k
        return k

    def _best(self, rows: int, counts: list[int], share: _Share) -> int:
        """Return the k that gains most if such a share of drafts is right; 0: none gains enough."""
        best, most = 0, 1.0
        if not self._costs.has_drafted or not share.is_known:
            return 0
        for k in counts:
            kind = Kind(rows, k)
            gain = share.expected(k) / self._costs.ratio(kind)
            least = _GAIN_ASSUMED
            if self._costs.is_measured(kind):
                least = _GAIN_KEPT if self._chosen else _GAIN_MEASURED
            # The present one is left only for one that is better by more than noise.
            if gain > least and gain * (_GAIN_OTHER if k == self._chosen else 1.0) > most:
                best, most = k, gain * (_GAIN_OTHER if k == self._chosen else 1.0)
        return best

    def _pays(self, num_running: int, counts: list[int]) -> bool:
        """Return whether so many rows are expected to draft once their prompts are computed."""
        return bool(self._best(rows_of_shape(num_running), counts, self._prepared_share))

    def _tells(self) -> bool:
        """Return whether a probe now tells what drafts are worth."""
        return not self._needs_prompts or any(seq.slot for seq in self._prepared)

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
        self._num_right += num_right
        self._share.tried(max(num_drafts, 1), num_right)


class _Share:
    """The share of drafts that were right, given that those before them were; old ones count less."""

    __slots__ = ("_right", "_tried", "num_waited", "remembered")

    def __init__(self) -> None:
        self._right, self._tried = _ASSUMED_SHARE * _ASSUMED_WEIGHT, _ASSUMED_WEIGHT
        self.num_waited = 0
        #: About the number of drafts that it is made of.
        self.remembered = _REMEMBERED

    def tried(self, num_drafts: int, num_right: int) -> None:
        # Those behind a wrong one say nothing.
        kept = (1.0 - 1.0 / self.remembered) ** (1 + num_right)
        self._right = kept * self._right + num_right
        self._tried = kept * self._tried + min(num_right + 1, num_drafts)

    @property
    def is_known(self) -> bool:
        return self._tried >= _LEAST_KNOWN

    @property
    def is_hopeless(self) -> bool:
        return self._tried >= _LEAST_TRIED and self._right < _LEAST_SHARE * self._tried

    def expected(self, k: int) -> float:
        """Return the ids that a row with k drafts is expected to yield."""
        share = self._right / self._tried
        return sum(share**at for at in range(k + 1))
