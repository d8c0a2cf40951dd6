"""Suspects compute alone, one at a time: steps of their own take turns with steps of all others, and of both kinds only
one step is in flight.

Others so go on at half their pace, and the engine's death names the one it died of.
"""

from __future__ import annotations

from photon_grpc.core.ports import Event
from photon_grpc.core.request import FinishReason
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.quarantine import NoQuarantine, Quarantine

_CUT_OFF = (FinishReason.UNSPECIFIED, FinishReason.ABORTED)


class Trial:
    """The one request on trial."""

    def __init__(self, quarantine: Quarantine | NoQuarantine) -> None:
        #: Its sequences that are alive; none while there is no trial.
        self.seqs: list[Sequence] = []
        self._quarantine = quarantine
        self._is_its_turn = False
        self._num_suspected = 0
        #: The end of the trial.
        self._end = Event()

    def begin(self, seqs: list[Sequence]) -> Event | None:
        """Puts a request on trial if it is a suspect. Returns the event to wait for where another one is on trial."""
        num_suspected = self._quarantine.num_suspected(seqs[0].fingerprint)
        if num_suspected is None or seqs[0] in self.seqs:
            return None
        if self.seqs:
            return self._end
        self.seqs, self._num_suspected = list(seqs), num_suspected
        return None

    def take_turns(self) -> None:
        """The next step is of the others if this one is of the suspect, and the other way round."""
        self._is_its_turn = not self._is_its_turn

    def may_compute(self, seq: Sequence) -> bool:
        """Return whether it is the turn of this sequence."""
        return (seq in self.seqs) is self._is_its_turn

    def settled(self) -> None:
        """Clears the suspect once each of its outputs has drawn a token, and has come further than it had come; ends
        the trial of one that an operator has cleared."""
        own = self.seqs[0].fingerprint
        is_clear = all(seq.num_generated and seq.num_output > self._num_suspected for seq in self.seqs)
        if is_clear or self._quarantine.num_suspected(own) is None:
            self._quarantine.clear(own)
            self._over()

    def ended(self, seq: Sequence) -> None:
        """One of its outputs has ended; the last one that was not cut off clears it."""
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
