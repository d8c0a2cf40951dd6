"""Requests that were being computed when an engine crashed.

Each is a suspect: when it is sent again, it computes alone once (scheduler/isolation.py). If the engine crashes again,
it is quarantined, that is, refused for a time. A suspect is cleared when it finishes, gets further alone
than it got beside others, or by an operator. The flight recorder passes all this from one engine to the next.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from photon_grpc.core.batch import Batch
from photon_grpc.core.fault import Fault
from photon_grpc.core.frames import Suspect
from photon_grpc.core.ports import Event, FlightRecorder
from photon_grpc.core.request import Request
from photon_grpc.core.sequence import Sequence, Status
from photon_grpc.errors import EngineFailure, EngineRestarting, InternalFailure, RequestQuarantined, Unavailable

_LOG = logging.getLogger(__name__)

_FINGERPRINT_BYTES = 16
#: With more records, those that expire first are forgotten. This many fit the recorder's memory with any names.
_MAX_RECORDS = 4096
_SUSPECTED_S = 600.0
_QUARANTINED_S = 3600.0
_RETRY_AFTER_S = 0.1


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The known facts of a suspect or quarantined request."""

    #: In CLOCK_MONOTONIC seconds.
    expires_s: float
    #: Most tokens that its output had when the engine crashed.
    num_tokens: int = 0
    is_quarantined: bool = False
    #: Its steps that crashed an engine or failed, and the Unix time of the last one.
    num_crashes: int = 1
    crashed_at_s: float = 0.0
    #: Id and owner of its newest attempt since it became a suspect.
    request_id: str = ""
    owner: str = ""


class Quarantine:
    """Knows suspects by their fingerprints, and passes the steps in flight to the flight recorder.

    Args:
        recorder: outlives the engine.
        wake: delivers an Event to the engine's loop, as in core.ports.Inbox.
        in_flight: the requests one of which crashed the previous engine: fingerprint -> most tokens of its output.
        known: what that engine had stored in its recorder.
    """

    def __init__(
        self, recorder: FlightRecorder, wake: Callable[[Event], None], in_flight: Mapping[bytes, int], known: bytes
    ) -> None:
        self._recorder = recorder
        self.wake = wake
        self._records = msgspec.msgpack.decode(known, type=dict[bytes, Record]) if known else {}
        if in_flight:
            self._attribute(in_flight)
        self._remember()

    # -- requests ------------------------------------------------------------------------------------------------------

    def receive(self, request: Request) -> bytes:
        """Return the request's fingerprint. A crash until `received` is blamed on this request alone.

        Raise RequestQuarantined.
        """
        own = fingerprint(request)
        self._recorder.receiving(own)
        record = self._record(own)
        if record is not None and record.is_quarantined:
            left_s = record.expires_s - time.monotonic()
            raise RequestQuarantined(
                "the engine crashed twice while computing this request, the second time alone; "
                f"it is refused for {left_s:.0f} s"
            )
        if record is not None and (record.request_id, record.owner) != (request.request_id, request.owner):
            self._records[own] = replace(record, request_id=request.request_id, owner=request.owner)
            self._remember()
        return own

    def received(self) -> None:
        self._recorder.received()

    def num_suspected(self, fingerprint: bytes) -> int | None:
        """Return the most tokens that a suspect's output had when the engine crashed; None if it is not a suspect."""
        record = self._record(fingerprint)
        return None if record is None else record.num_tokens

    def clear(self, fingerprint: bytes) -> None:
        """Forget a suspect that did not cause the crash."""
        if self._records.pop(fingerprint, None) is not None:
            self._remember()

    # -- operators -----------------------------------------------------------------------------------------------------

    def suspects(self) -> tuple[Suspect, ...]:
        """Return all suspects, the newest crash first."""
        now_s = time.monotonic()
        known = [
            Suspect(
                own.hex(),
                record.is_quarantined,
                record.num_crashes,
                record.crashed_at_s,
                record.expires_s - now_s,
                record.request_id,
                record.owner,
            )
            for own, record in self._records.items()
            if self._record(own) is not None
        ]
        return tuple(sorted(known, key=lambda each: each.crashed_at_s, reverse=True))

    def forget(self, fingerprints: Iterable[str]) -> tuple[str, ...]:
        """Forget these fingerprints, in hex, or all if none are named; return those that were known."""
        wanted = set(fingerprints)
        known = tuple(each.fingerprint for each in self.suspects() if not wanted or each.fingerprint in wanted)
        for each in known:
            _LOG.warning("an operator has cleared %s", each)
            self._records.pop(bytes.fromhex(each))
        self._remember()
        return known

    # -- steps ---------------------------------------------------------------------------------------------------------

    def admitted(self, seq: Sequence, step: int) -> None:
        self._recorder.admitted(seq.slot, step - seq.num_output, seq.fingerprint)

    def launching(self, batch: Batch) -> None:
        self._recorder.launching(batch.step, batch.slots)

    def settled(self, step: int) -> None:
        self._recorder.settled(step)

    # -- steps that fail -----------------------------------------------------------------------------------------------

    def attributed(self, faults: dict[int, Fault], rows: list[Sequence]) -> dict[int, Fault]:
        """Return the faults of a step's rows.

        One of the requests made the launch fail, for example by lack of memory. If there are several, all become
        suspects and are asked to retry.
        """
        failed = {
            row: rows[row]
            for row, fault in faults.items()
            if fault.reason == InternalFailure.reason and rows[row].status is not Status.FINISHED
        }
        suspects: dict[bytes, int] = {}
        for seq in failed.values():
            suspects[seq.fingerprint] = max(suspects.get(seq.fingerprint, 0), seq.num_output)
        if len(suspects) < 2:
            return faults
        self._suspect(suspects)
        self._remember()
        return {**faults, **{row: self.lost(seq, faults[row]) for row, seq in failed.items()}}

    def lost(self, seq: Sequence, fault: Fault) -> Fault:
        """Return the error of a sequence that failed because of another one in its step."""
        again: type[Unavailable] = EngineRestarting
        message = "a step that it shared with others failed; nothing was sent yet"
        if seq.num_generated:
            again = EngineFailure
            message = "a step that it shared with others failed: continue from what was sent"
        return Fault.of(again(message, retry_after_s=_RETRY_AFTER_S))

    # -- after a crash -------------------------------------------------------------------------------------------------

    def _attribute(self, in_flight: Mapping[bytes, int]) -> None:
        """Quarantine a suspect that was in flight alone; otherwise make all requests suspects."""
        now_s = time.monotonic()
        first, *others = in_flight
        if not others and self._record(first) is not None:
            self._accuse(first, Record(now_s + _QUARANTINED_S, is_quarantined=True))
            _LOG.error("the engine crashed a second time while computing one request: %s is quarantined", first.hex())
            return
        self._suspect(in_flight)
        _LOG.warning("requests in the steps that the engine died in: %d; each computes alone once", len(in_flight))

    def _suspect(self, in_flight: Mapping[bytes, int]) -> None:
        expires_s = time.monotonic() + _SUSPECTED_S
        for each, num_tokens in in_flight.items():
            self._accuse(each, Record(expires_s, num_tokens))

    def _accuse(self, fingerprint: bytes, record: Record) -> None:
        before = self._record(fingerprint) or Record(0.0, num_crashes=0)
        self._records[fingerprint] = replace(
            record,
            num_crashes=before.num_crashes + 1,
            crashed_at_s=time.time(),
            request_id=before.request_id,
            owner=before.owner,
        )

    def _record(self, fingerprint: bytes) -> Record | None:
        record = self._records.get(fingerprint)
        return record if record is not None and record.expires_s > time.monotonic() else None

    def _remember(self) -> None:
        now_s = time.monotonic()
        kept = sorted(self._records.items(), key=lambda item: item[1].expires_s)[-_MAX_RECORDS:]
        self._records = {fingerprint: record for fingerprint, record in kept if record.expires_s > now_s}
        self._recorder.remember(msgspec.msgpack.encode(self._records))


class NoQuarantine:
    """The quarantine of an engine in the caller's program, which records nothing, since nothing outlives a crash."""

    def wake(self, event: Event) -> None:
        pass

    def receive(self, request: Request) -> bytes:
        return b""

    def received(self) -> None:
        pass

    def num_suspected(self, fingerprint: bytes) -> int | None:
        return None

    def clear(self, fingerprint: bytes) -> None:
        pass

    def suspects(self) -> tuple[Suspect, ...]:
        return ()

    def forget(self, fingerprints: Iterable[str]) -> tuple[str, ...]:
        return ()

    def admitted(self, seq: Sequence, step: int) -> None:
        pass

    def launching(self, batch: Batch) -> None:
        pass

    def settled(self, step: int) -> None:
        pass

    def attributed(self, faults: dict[int, Fault], rows: list[Sequence]) -> dict[int, Fault]:
        return faults

    def lost(self, seq: Sequence, fault: Fault) -> Fault:
        return fault


def fingerprint(request: Request) -> bytes:
    """Return a digest of what decides a request's steps.

    It is the same for every attempt, also one that continues the output of an earlier one, and for constraints that
    differ only in annotations and the order of keys.
    """
    sampling, constraint = request.sampling, request.constraint
    if request.is_seed_random:
        sampling = replace(sampling, seed=0)
    meaning = constraint and (constraint.digest or constraint)
    decisive = (request.prompt_ids, sampling, request.num_outputs, request.adapter, request.logprobs, meaning)
    return hashlib.blake2b(msgspec.msgpack.encode(decisive), digest_size=_FINGERPRINT_BYTES).digest()
