"""Who is suspected, for how long, and at whose cost."""

from __future__ import annotations

import msgspec
import pytest

from photon_grpc.bridge.flight_recorder import _MAX_KNOWN_BYTES
from photon_grpc.core.batch import Batch
from photon_grpc.core.frames import Control, Reply
from photon_grpc.core.ports import Pending
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.engine.scheduler import quarantine
from photon_grpc.engine.scheduler.quarantine import Quarantine, fingerprint
from photon_grpc.errors import RequestQuarantined
from tests.engine.fakes import FakeRecorder, complete
from tests.engine.harness import Harness, Setting

REQUEST = Request("r", (1, 2, 3), SamplingParams(seed=3), StopParams(8), 0.0)
OWN = fingerprint(REQUEST)


def after(in_flight: dict[bytes, int], known: bytes = b"") -> tuple[Quarantine, bytes]:
    """Return the quarantine of the next engine, and what it stores."""
    recorder = FakeRecorder()
    return Quarantine(recorder, lambda event: None, in_flight, known), recorder.known


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr(quarantine.time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    "attempt",
    [
        {"request_id": "other", "owner": "other", "arrival_s": 9.0, "deadline_s": 9.0, "replaces": True, "salt": "x"},
        {"continued_ids": (4, 5), "stop": StopParams(6)},
    ],
)
def test_attempts_of_a_call_are_one_request(attempt: dict) -> None:
    assert fingerprint(msgspec.structs.replace(REQUEST, **attempt)) == OWN


def test_a_seed_counts_where_the_caller_set_it() -> None:
    other = msgspec.structs.replace(REQUEST, sampling=SamplingParams(seed=4))
    assert fingerprint(other) != OWN
    drawn = [msgspec.structs.replace(each, is_seed_random=True) for each in (REQUEST, other)]
    assert fingerprint(drawn[0]) == fingerprint(drawn[1])
    assert fingerprint(msgspec.structs.replace(REQUEST, prompt_ids=(1, 2))) != OWN


def test_suspects_and_the_quarantined_are_forgotten_in_time(clock: list[float]) -> None:
    suspecting, known = after({OWN: 7, b"b" * 16: 2})
    assert suspecting.num_suspected(OWN) == 7
    clock[0] += 599.0
    refusing, known = after({OWN: 9}, known)
    for left_s in (3600, 1):
        with pytest.raises(RequestQuarantined, match=f"refused for {left_s} s"):
            refusing.receive(REQUEST)
        clock[0] += 3599.0
    assert refusing.receive(REQUEST) == OWN
    assert after({}, known)[0].num_suspected(b"b" * 16) is None


def test_a_suspect_that_expired_may_be_one_again(clock: list[float]) -> None:
    _, known = after({OWN: 7})
    clock[0] += 601.0
    again, _ = after({OWN: 7}, known)
    assert again.receive(REQUEST) == OWN


def test_the_table_is_bounded(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "_MAX_RECORDS", 3)
    known, many = b"", [bytes([number]) * 16 for number in range(10)]
    for each in many:
        clock[0] += 1.0
        last, known = after({each: 1, OWN: 1}, known)
    assert [each for each in (*many, OWN) if last.num_suspected(each) is not None] == [*many[-2:], OWN]


def test_a_full_table_fits_the_recorders_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight = {number.to_bytes(16, "big"): 1 << 20 for number in range(quarantine._MAX_RECORDS)}
    named = {"request_id": "r" * 128, "owner": "k" * 64, "num_crashes": 1 << 31, "crashed_at_s": 1.8e9}
    monkeypatch.setattr(quarantine, "replace", lambda record, **names: msgspec.structs.replace(record, **named))
    full, known = after(in_flight)
    assert len(full.suspects()) == quarantine._MAX_RECORDS
    assert 900_000 < len(known) <= _MAX_KNOWN_BYTES


def test_operators_see_who_sent_the_request_that_ended_the_engine() -> None:
    def told(quarantine: Quarantine) -> list[tuple[str, bool, int, str, str]]:
        listed = quarantine.suspects()
        assert all(each.left_s > 599 for each in listed)
        return [
            (each.fingerprint, each.is_quarantined, each.num_crashes, each.request_id, each.owner) for each in listed
        ]

    beside = b"b" * 16
    suspecting, _ = after({OWN: 7, beside: 2})
    assert sorted(told(suspecting)) == sorted([(OWN.hex(), False, 1, "", ""), (beside.hex(), False, 1, "", "")])
    suspecting.receive(msgspec.structs.replace(REQUEST, request_id="again", owner="search"))
    refusing, _ = after({OWN: 9}, suspecting._recorder.known)  # type: ignore[attr-defined]
    assert told(refusing) == [(OWN.hex(), True, 2, "again", "search"), (beside.hex(), False, 1, "", "")]
    assert refusing.forget([OWN.hex(), "00" * 16, "no hex"]) == (OWN.hex(),)
    assert refusing.receive(REQUEST) == OWN
    # What an operator has cleared is cleared for the next engine, too.
    later, _ = after({}, refusing._recorder.known)  # type: ignore[attr-defined]
    assert told(later) == [(beside.hex(), False, 1, "", "")]
    assert later.forget([]) == (beside.hex(),) and not later.suspects()


def test_expired_entries_are_neither_listed_nor_counted(clock: list[float]) -> None:
    _, known = after({OWN: 7})
    clock[0] += 601.0
    again, _ = after({OWN: 7}, known)
    assert [each.num_crashes for each in again.suspects()] == [1]
    clock[0] += 601.0
    assert not again.suspects()


def test_a_suspect_that_is_cleared_computes_beside_others_at_once() -> None:
    harness = Harness(in_flight={OWN: 20, fingerprint(msgspec.structs.replace(REQUEST, prompt_ids=(5,))): 20})
    suspect, other = harness.add([1, 2, 3], 12, seed=3), harness.add([5], 12, seed=3)
    harness.step()
    assert len(harness.scheduler.live.isolation.seqs) == 1
    harness.post.put(Control(1, "clear_quarantine"))
    harness.step()
    harness.post.put(Control(2, "list_quarantine"))
    harness.step()
    assert not harness.scheduler.live.isolation.seqs
    assert {name for _, reply in harness.post.sent if isinstance(reply, Reply) for name in reply.names} >= {OWN.hex()}
    assert (0, Reply(2)) in harness.post.sent
    harness.run()
    assert harness.outcomes[suspect].ids == complete([1, 2, 3], 12, seed=3)
    assert harness.outcomes[other].ids == complete([5], 12, seed=3)
    assert harness.idle()


def test_others_go_on_while_a_suspect_computes_alone() -> None:
    harness = Harness(in_flight={OWN: 4})
    beside = [harness.add([9, number], 12, seed=number) for number in range(3)]
    for _ in range(3):
        harness.step()
    suspect = harness.add([1, 2, 3], 8, seed=3)
    for _ in range(8):
        harness.step()
    assert len(harness.outcomes[suspect].ids) == 4
    assert [len(harness.outcomes[handle].ids) for handle in beside] == [7, 7, 7]
    assert harness.scheduler.live.isolation.seqs
    for _ in range(3):
        harness.step()
    # Cleared by its fifth token: all compute together again, and it is no suspect any more.
    assert not harness.scheduler.live.isolation.seqs
    assert len(harness.outcomes[suspect].ids) == 7
    harness.run()
    assert harness.outcomes[suspect].ids == complete([1, 2, 3], 8, seed=3)
    assert harness.scheduler.quarantine.num_suspected(OWN) is None
    assert harness.idle()


@pytest.mark.parametrize("num_continued", [4, 6])
def test_a_suspect_that_is_continued_computes_one_token_alone(num_continued: int) -> None:
    """It had 4 when the engine died: it is cleared by the next, also where its caller says that there were more."""
    expected = complete([1, 2, 3], 12, seed=3)
    harness = Harness(Setting(max_num_batched_tokens=4), in_flight={OWN: 4})
    beside = harness.add([9], 12)
    harness.step()
    suspect = harness.add([1, 2, 3], 12, seed=3, continued_ids=tuple(expected[:num_continued]))
    while not harness.outcomes[suspect].ids:
        assert harness.scheduler.quarantine.num_suspected(OWN) == 4
        harness.step()
    assert len(harness.outcomes[suspect].ids) == 1
    assert not harness.scheduler.live.isolation.seqs
    assert harness.scheduler.quarantine.num_suspected(OWN) is None
    harness.run()
    assert harness.outcomes[suspect].ids == expected[num_continued:]
    assert harness.outcomes[beside].ids == complete([9], 12)
    assert harness.idle()


def test_a_crash_report_has_the_length_of_a_continued_output() -> None:
    harness = Harness(in_flight={})
    harness.add([1, 2, 3], 40, seed=3, continued_ids=tuple(complete([1, 2, 3], 20, seed=3)))
    submit = harness.runner.submit
    seen: list[dict[bytes, int]] = []

    def submit_and_look(batch: Batch) -> Pending:
        seen.append(harness.recorder.in_flight())
        return submit(batch)

    harness.runner.submit = submit_and_look  # type: ignore[method-assign]
    for _ in range(3):
        harness.step()
    assert seen == [{OWN: 20}, {OWN: 21}, {OWN: 22}]


def test_suspects_wait_for_each_other_and_leave_when_their_callers_do() -> None:
    harness = Harness(in_flight={OWN: 3, fingerprint(msgspec.structs.replace(REQUEST, prompt_ids=(5,))): 3})
    first, same, other = (harness.add(prompt, 8, seed=3) for prompt in ([1, 2, 3], [1, 2, 3], [5]))
    for _ in range(4):
        harness.step()
    assert [len(harness.outcomes[handle].ids) for handle in (first, same, other)] == [4, 0, 0]
    harness.abort(other)
    harness.run()
    assert harness.outcomes[same].ids == harness.outcomes[first].ids == complete([1, 2, 3], 8, seed=3)
    assert harness.idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_fails_only_the_request_that_caused_it(depth: int) -> None:
    """For want of memory, say: the others are to come again, it alone fails then as well."""
    harness = Harness(Setting(depth=depth), in_flight={})
    runner, submit = harness.runner, harness.runner.submit
    poison = 7

    def submit_or_fail(batch: Batch) -> Pending:
        rows = [seq for seq in harness.scheduler.live.running if seq.slot in batch.slots]
        if any(seq.request.prompt_ids[0] == poison for seq in rows):
            runner.fail_steps[batch.step] = 9
        return submit(batch)

    runner.submit = submit_or_fail  # type: ignore[method-assign]
    spoken = harness.add([1, 2], 30, seed=3)
    for _ in range(3):
        harness.step()
    mute, fatal = harness.add([3, 4], 4, seed=3), harness.add([poison], 4)
    harness.run()
    told = {handle: harness.outcomes[handle].failed.reason for handle in (spoken, mute, fatal)}
    assert told == {spoken: "ENGINE_FAILURE", mute: "ENGINE_RESTARTING", fatal: "ENGINE_RESTARTING"}
    again = [harness.add(ids, 30, seed=3) for ids in ([1, 2], [3, 4])]
    fatal = harness.add([poison], 4)
    harness.run()
    assert [harness.outcomes[handle].ids for handle in again] == [complete(ids, 30, seed=3) for ids in ([1, 2], [3, 4])]
    assert harness.outcomes[fatal].failed.reason == "INTERNAL_FAILURE"
    assert harness.idle()
