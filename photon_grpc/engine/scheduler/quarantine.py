"""Requests that were being computed when an engine died.

Each is a suspect: sent again, it computes alone once (scheduler/isolation.py). Where the engine dies of that too, it is
quarantined: refused until that expires. A suspect is cleared when it has finished, or has come further alone than it
had come beside others, or by an operator. What one engine knows the next one learns from the flight recorder.
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
#: Of more records, those that expire first are forgotten. So many fit the recorder's memory, whatever their names.
_MAX_RECORDS = 4096
_SUSPECTED_S = 600.0
_QUARANTINED_S = 3600.0
_RETRY_AFTER_S = 0.1


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A suspect, or one that is quarantined."""

    #: CLOCK_MONOTONIC.
    expires_s: float
    #: Its output's length at most when the engine died.
    num_tokens: int = 0
    is_quarantined: bool = False
    #: Steps of it that an engine died in, or that failed; the last one's Unix time.
    num_crashes: int = 1
    crashed_at_s: float = 0.0
    #: Of its newest attempt while it was a suspect.
    request_id: str = ""
    owner: str = ""


class Quarantine:
    """Knows suspects by their fingerprints, and has the flight recorder trace the steps in flight.

    Args:
        recorder: outlives the engine.
        wake: brings an Event to the engine's loop, as core.ports.Inbox.
        in_flight: what the engine before this one died of, one of them: fingerprint -> tokens of its output at most.
        known: what that engine had its recorder remember.
    """

    def __init__(
        self, recorder: FlightRecorder, wake: Callable[[Event], None], in_flight: Mapping[bytes, int], known: bytes
    ) -> None:
        self._recorder = recorder
        self.wake = wake
        self._records = msgspec.msgpack.decode(known, type=dict[bytes, Record]) if known else {}
        if in_flight:
            self._judge(in_flight)
        self._remember()

    # -- requests ------------------------------------------------------------------------------------------------------

    def receive(self, request: Request) -> bytes:
        """Return the request's fingerprint; what fails until `received` is its fault alone. Raise
        RequestQuarantined."""
        own = fingerprint(request)
        self._recorder.receiving(own)
        record = self._record(own)
        if record is not None and record.is_quarantined:
            left_s = record.expires_s - time.monotonic()
            raise RequestQuarantined(
                f"the engine died of this request twice, the second time of it alone; it is refused for {left_s:.0f} s"
            )
        if record is not None and (record.request_id, record.owner) != (request.request_id, request.owner):
            self._records[own] = replace(record, request_id=request.request_id, owner=request.owner)
            self._remember()
        return own

    def received(self) -> None:
        self._recorder.received()

    def num_suspected(self, fingerprint: bytes) -> int | None:
        """Tokens that a suspect's output had at most when the engine died; None: it is no suspect."""
        record = self._record(fingerprint)
        return None if record is None else record.num_tokens

    def clear(self, fingerprint: bytes) -> None:
        """It was not this one."""
        if self._records.pop(fingerprint, None) is not None:
            self._remember()

    # -- operators -----------------------------------------------------------------------------------------------------

    def suspects(self) -> tuple[Suspect, ...]:
        """All that are known, the newest crash first."""
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
        """Forget these (none named: all), in hex; return those that were known."""
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
        """Return the faults of a step's rows. A launch fails by one of its requests, for want of memory: where there
        are several, all are suspects and are to come again."""
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
        """Return the error of a sequence that a step of others took with it."""
        again: type[Unavailable] = EngineRestarting
        message = "a step that it shared with others failed; nothing was sent yet"
        if seq.num_generated:
            again = EngineFailure
            message = "a step that it shared with others failed: continue from what was sent"
        return Fault.of(again(message, retry_after_s=_RETRY_AFTER_S))

    # -- after a death -------------------------------------------------------------------------------------------------

    def _judge(self, in_flight: Mapping[bytes, int]) -> None:
        """A suspect that was alone is the one; else all are suspects."""
        now_s = time.monotonic()
        first, *others = in_flight
        if not others and self._record(first) is not None:
            self._accuse(first, Record(now_s + _QUARANTINED_S, is_quarantined=True))
            _LOG.error("the engine died of one request for the second time: %s is quarantined", first.hex())
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
    """For an engine in the caller's own program, which nothing outlives: suspects and traces nothing."""

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
    """Digest what decides a request's steps: the same for every attempt, also for one that continues an earlier one's
    output, and for constraints that differ in nothing but annotations and the order of keys."""
    sampling, constraint = request.sampling, request.constraint
    if request.is_seed_random:
        sampling = replace(sampling, seed=0)
    meaning = constraint and (constraint.digest or constraint)
    said = (request.prompt_ids, sampling, request.num_outputs, request.adapter, request.logprobs, meaning)
    return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=_FINGERPRINT_BYTES).digest()
