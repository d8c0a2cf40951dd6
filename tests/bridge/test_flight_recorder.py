"""What an engine's death leaves of the steps that were in flight."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from photon_grpc.bridge.flight_recorder import FlightRecord, LastFlight, SharedFlightRecorder

A, B, C = (bytes([each]) * 16 for each in (1, 2, 3))


@pytest.fixture
def record():
    record = FlightRecord()
    yield record
    record.close()
    record.close()


def engine(record: FlightRecord) -> SharedFlightRecorder:
    """Return the recorder of the next engine."""
    return SharedFlightRecorder(os.dup(record.fd))


def recording(record: FlightRecord) -> SharedFlightRecorder:
    recorder = engine(record)
    for slot, fingerprint in enumerate((A, B, C), 1):
        recorder.admitted(slot, slot, fingerprint)
    return recorder


def test_the_first_engine_finds_nothing(record) -> None:
    assert engine(record).last == LastFlight({}, b"")


def test_rows_of_steps_that_were_not_read_are_suspects(record) -> None:
    recorder = recording(record)
    recorder.launching(4, (1, 2, 3))
    recorder.launching(5, (2, 1))
    recorder.settled(4)
    assert engine(record).last.suspects == {A: 4, B: 3}


def test_an_output_may_be_longer_than_its_engine_has_steps(record) -> None:
    """It was continued."""
    recorder = engine(record)
    recorder.admitted(1, -100, A)
    recorder.launching(2, (1,))
    assert engine(record).last.suspects == {A: 102}


def test_completed_steps_and_repeated_engines_accuse_no_request(record) -> None:
    recorder = recording(record)
    for step in range(1, 30):
        recorder.launching(step, (1, 2, 3))
        recorder.settled(step)
    assert engine(record).last.suspects == {}
    recording(record).launching(1, (3,))
    assert engine(record).last.suspects == {C: 0}
    assert engine(record).last.suspects == {}


def test_rows_that_were_written_before_are_not_taken_for_those_of_a_step(record) -> None:
    recorder = recording(record)
    for step in range(1, 40):
        recorder.launching(step, (1, 2, 3) if step < 30 else (2,))
        recorder.settled(step - 1)
    assert engine(record).last.suspects == {B: 37}


def test_a_request_that_is_being_taken_in_is_the_only_suspect(record) -> None:
    recorder = recording(record)
    recorder.launching(1, (1, 2))
    recorder.receiving(C)
    recorder.received()
    recorder.receiving(B)
    assert engine(record).last.suspects == {B: 0}


def test_an_end_from_outside_accuses_no_request_and_keeps_known_suspects(record) -> None:
    recorder = recording(record)
    recorder.remember(b"who")
    recorder.remember(b"what is known")
    recorder.receiving(C)
    recorder.launching(1, (1, 2))
    record.absolve()
    assert engine(record).last == LastFlight({}, b"what is known")


def test_a_killed_process_leaves_its_trace(record) -> None:
    program = (
        "import os, sys; from photon_grpc.bridge.flight_recorder import SharedFlightRecorder; "
        "recorder = SharedFlightRecorder(int(sys.argv[1])); recorder.admitted(70, 2, b'x' * 16); "
        "recorder.launching(9, tuple(range(1, 71))); os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", program, str(record.fd)], pass_fds=(record.fd,), check=False)
    assert done.returncode < 0
    assert engine(record).last.suspects[b"x" * 16] == 7


def test_records_beyond_the_capacity_are_refused(record) -> None:
    with pytest.raises(ValueError, match="exceed the limit of 1048576"):
        engine(record).remember(bytes(2**20 + 1))
