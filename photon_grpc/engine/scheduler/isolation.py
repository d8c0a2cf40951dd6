"""Has suspects compute alone, one at a time: their steps alternate with those of all others, one step in flight.

The others continue at half their pace, and a crash of the engine identifies the request that caused it.
"""

from __future__ import annotations

from collections.abc import Callable

from photon_grpc.core.ports import Event
from photon_grpc.core.request import FinishReason
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.scheduler.batch_builder import BatchBuilder
from photon_grpc.engine.scheduler.quarantine import NoQuarantine, Quarantine

_CUT_OFF = (FinishReason.UNSPECIFIED, FinishReason.ABORTED)


class Isolation:
    """The isolated request, if there is one, and whose turn the next step is."""

    def __init__(self, quarantine: Quarantine | NoQuarantine) -> None:
        #: Its live sequences; empty while no suspect is isolated.
        self.seqs: list[Sequence] = []
        self._quarantine = quarantine
        self._is_its_turn = False
        self._num_suspected = 0
        #: Happens when the suspect has ended.
        self._end = Event()

    def begin(self, seqs: list[Sequence]) -> Event | None:
        """Isolate a request if it is a suspect. If another is isolated already, return the event to wait for."""
        num_suspected = self._quarantine.num_suspected(seqs[0].fingerprint)
        if num_suspected is None or seqs[0] in self.seqs:
            return None
        if self.seqs:
            return self._end
        self.seqs, self._num_suspected = list(seqs), num_suspected
        return None

    def planned(self, plan: Callable[[], BatchBuilder], is_flying: bool) -> BatchBuilder | None:
        """Plan a step: of all, or of the suspect and the others in turn, and then None while a step is in flight."""
        if not self.seqs:
            return plan()
        if is_flying:
            return None
        self._is_its_turn = not self._is_its_turn
        planned = plan()
        if not planned.rows:
            self._is_its_turn = not self._is_its_turn
            planned = plan()
        return planned

    def may_compute(self, seq: Sequence) -> bool:
        """Return whether it is the turn of this sequence."""
        return not self.seqs or (seq in self.seqs) is self._is_its_turn

    def in_turn(self, seqs: list[Sequence]) -> list[Sequence]:
        """Return the sequences whose turn it is."""
        return [seq for seq in seqs if self.may_compute(seq)] if self.seqs else seqs

    def settled(self) -> None:
        """Clear the suspect once each of its outputs has a new token and is longer than it was at the crash.

        Also end the isolation of a suspect that an operator has cleared.
        """
        if not self.seqs:
            return
        own = self.seqs[0].fingerprint
        is_clear = all(seq.num_generated and seq.num_output > self._num_suspected for seq in self.seqs)
        if is_clear or self._quarantine.num_suspected(own) is None:
            self._quarantine.clear(own)
            self._over()

    def ended(self, seq: Sequence) -> None:
        """Clear the suspect if its last output was not cut off."""
        if seq not in self.seqs:
            return
        self.seqs.remove(seq)
        if not self.seqs:
            if seq.finish_reason not in _CUT_OFF:
                self._quarantine.clear(seq.fingerprint)
            self._over()

    def _over(self) -> None:
        self.seqs = []
        event, self._end = self._end, Event()
        self._quarantine.wake(event)
