"""RetryPolicy as a table: which failure is retried, at which attempt, after how long without progress."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from photon_grpc import errors
from photon_grpc.client import Unreachable, retry_policy
from photon_grpc.client.many import PERSISTENT
from photon_grpc.client.retry_policy import Attempts, RetryPolicy
from photon_grpc.errors import PhotonError

STREAM = RetryPolicy(is_after_grpc=True)
MULTIPLEXED = RetryPolicy()
ONCE = RetryPolicy(max_retries=0, resumes=False)

#: The longest pauses after the first failures since the last progress; they are randomly shortened by up to half.
GROWING_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)


def lost() -> Unreachable:
    error = Unreachable("Socket closed")
    error.was_lost = True
    return error


def error_of(reason: str, retry_after_s: float | None = None) -> PhotonError:
    if reason == "LOST":
        return lost()
    return (
        Unreachable("gone") if reason == "UNREACHABLE" else errors.from_reason(reason, "x", retry_after_s=retry_after_s)
    )


def attempts_of(policy: RetryPolicy, reason: str, *, has_begun: bool) -> float:
    """Return the number of the last attempt whose failure is retried; infinity from a thousand on."""
    numbers = (1, 2, 3, 4, 5, 8, 9, 1000)
    allowed = [n for n in numbers if policy.pause_s(error_of(reason), n, has_begun=has_begun) is not None]
    assert allowed == list(numbers[: len(allowed)])
    return math.inf if 1000 in allowed else max(allowed, default=0)


@pytest.mark.parametrize(
    ("reason", "stream", "multiplexed", "persistent", "resumed"),
    [
        # Retries before output: of a stream, a multiplexed request, `map`; and of any after output has begun.
        ("LOST", 4, 4, math.inf, math.inf),
        ("UNREACHABLE", 0, 4, math.inf, math.inf),
        ("MODEL_LOADING", 0, 4, math.inf, math.inf),
        ("DRAINING", 0, 4, math.inf, math.inf),
        ("ENGINE_RESTARTING", 0, 4, math.inf, math.inf),
        ("ENGINE_FAILURE", 0, 4, math.inf, math.inf),
        ("IDLE_STREAM_EVICTED", 8, 8, 8, math.inf),
        ("OVERLOADED", 0, 4, math.inf, math.inf),
        ("QUEUE_FULL", 0, 4, math.inf, math.inf),
        ("QUEUE_TIMEOUT", 0, 4, math.inf, math.inf),
        ("QUOTA_EXCEEDED", 0, 0, 0, 0),
        ("DUPLICATE_REQUEST_ID", 0, 0, 0, math.inf),
        ("INVALID_REQUEST", 0, 0, 0, 0),
        ("DEADLINE_PASSED", 0, 0, 0, 0),
        ("DEADLINE_UNREACHABLE", 0, 0, 0, 0),
        ("ABORTED_BY_ADMIN", 0, 0, 0, 0),
        ("REQUEST_QUARANTINED", 0, 0, 0, 0),
        ("NUMERIC_FAILURE", 0, 0, 0, 0),
        ("CANCELLED", 0, 0, 0, 0),
        ("INTERNAL_FAILURE", 0, 0, 0, 0),
    ],
)
def test_each_reason_has_its_number_of_retries(
    reason: str, stream: float, multiplexed: float, persistent: float, resumed: float
) -> None:
    assert attempts_of(STREAM, reason, has_begun=False) == stream
    assert attempts_of(MULTIPLEXED, reason, has_begun=False) == multiplexed
    assert attempts_of(PERSISTENT, reason, has_begun=False) == persistent
    assert attempts_of(STREAM, reason, has_begun=True) == attempts_of(MULTIPLEXED, reason, has_begun=True) == resumed
    assert attempts_of(ONCE, reason, has_begun=True) == 0
    assert attempts_of(ONCE, reason, has_begun=False) == (8 if reason == "IDLE_STREAM_EVICTED" else 0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_quota_with_a_retry_delay_is_waited_for(has_begun: bool) -> None:
    assert MULTIPLEXED.pause_s(error_of("QUOTA_EXCEEDED", 3.0), 1, has_begun=has_begun) == 3.0


@pytest.mark.parametrize(("attempt", "longest_s"), list(enumerate(GROWING_S, 1)))
def test_pauses_grow_and_differ_by_chance(attempt: int, longest_s: float) -> None:
    pauses_s = [STREAM.pause_s(lost(), attempt, has_begun=True) for _ in range(200)]
    assert all(pause_s is not None and longest_s / 2 <= pause_s <= longest_s for pause_s in pauses_s)
    assert len(set(pauses_s)) > 100 or longest_s == 0.0


@pytest.mark.parametrize(
    ("reason", "retry_after_s", "at_least_s"),
    [("QUEUE_FULL", None, 0.1), ("QUEUE_FULL", 7.0, 7.0), ("QUOTA_EXCEEDED", 7.0, 7.0), ("DRAINING", 7.0, 0.0)]
    + [("ENGINE_RESTARTING", 7.0, 7.0), ("ENGINE_FAILURE", 7.0, 7.0), ("ENGINE_FAILURE", None, 0.0)],
)
def test_a_servers_delay_is_kept_and_a_draining_server_is_left_at_once(
    reason: str, retry_after_s: float | None, at_least_s: float
) -> None:
    assert STREAM.pause_s(error_of(reason, retry_after_s), 1, has_begun=True) == at_least_s


@pytest.mark.parametrize(("attempt", "longest_s"), list(enumerate(GROWING_S[1:], 1)))
def test_a_call_that_fails_after_a_heartbeat_pauses_as_grpc_would(attempt: int, longest_s: float) -> None:
    policy = RetryPolicy(max_retries=math.inf, is_after_grpc=True)
    error = error_of("DRAINING")
    for _ in range(50):
        pause_s = policy.pause_s(error, attempt, has_begun=False, has_heartbeat=True)
        assert pause_s is not None and longest_s / 2 <= pause_s <= longest_s


@pytest.mark.parametrize("reason", ["DRAINING", "ENGINE_RESTARTING", "UNAVAILABLE", "QUEUE_FULL"])
def test_the_servers_delay_holds_after_a_heartbeat(reason: str) -> None:
    assert STREAM.pause_s(error_of(reason, 7.0), 1, has_begun=False, has_heartbeat=True) == 7.0


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_server_that_forbids_retries_is_obeyed(has_begun: bool) -> None:
    error = error_of("UNAVAILABLE", 7.0)
    error.is_final = True
    assert PERSISTENT.pause_s(error, 1, has_begun=has_begun) is None
    evicted = error_of("IDLE_STREAM_EVICTED")
    evicted.is_final = True  # only for gRPC's own retries: the next request opens the stream again
    assert MULTIPLEXED.pause_s(evicted, 1, has_begun=has_begun) == 0.0


@pytest.mark.parametrize(
    ("policy", "reason", "stalled_s", "is_tried"),
    [
        (STREAM, "LOST", 54.0, True),
        (STREAM, "LOST", 60.1, False),
        (STREAM, "QUEUE_FULL", 60.1, False),
        (PERSISTENT, "UNREACHABLE", 60.1, False),
        (PERSISTENT, "OVERLOADED", 60.1, False),
        (PERSISTENT, "QUEUE_FULL", 1e6, True),
        (PERSISTENT, "QUEUE_TIMEOUT", 1e6, True),
    ],
)
def test_patience_is_time_without_progress(policy: RetryPolicy, reason: str, stalled_s: float, is_tried: bool) -> None:
    pause_s = policy.pause_s(error_of(reason), 20, stalled_s, has_begun=policy is STREAM)
    assert (pause_s is not None) == is_tried


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(now_s=time.monotonic())
    fake.monotonic = lambda: fake.now_s
    monkeypatch.setattr(retry_policy, "time", fake)
    return fake


def test_no_pause_reaches_beyond_the_deadline(clock: SimpleNamespace) -> None:
    attempts = Attempts(STREAM, timeout_s=10.0, has_begun=True)
    clock.now_s += 8
    full = error_of("QUEUE_FULL", 30.0)
    assert attempts.pause_s(full) == 2.0
    assert attempts.left_s(full) == 2.0
    clock.now_s += 2
    with pytest.raises(errors.DeadlinePassed, match="10 s have passed"):
        attempts.left_s(full)


def test_progress_renews_patience(clock: SimpleNamespace) -> None:
    attempts = Attempts(STREAM, has_begun=True)
    assert attempts.pause_s(lost()) == 0.0
    clock.now_s += 59
    attempts.progress()
    clock.now_s += 59
    assert attempts.pause_s(lost()) == 0.0
    clock.now_s += 61
    with pytest.raises(Unreachable):
        attempts.pause_s(lost())


def test_a_server_that_says_that_it_is_full_renews_patience_of_map(clock: SimpleNamespace) -> None:
    attempts = Attempts(PERSISTENT)
    for reason in ("UNREACHABLE", "QUEUE_FULL", "UNREACHABLE"):
        attempts.pause_s(error_of(reason))
        clock.now_s += 50
    with pytest.raises(Unreachable):
        attempts.pause_s(error_of("UNREACHABLE"))
