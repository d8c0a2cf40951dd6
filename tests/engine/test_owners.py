"""Owners beside each other in one engine: places in its queue, and quotas over all front ends."""

from __future__ import annotations

import time

import pytest

from photon_grpc.core.frames import Abort, Add, StepFrame
from photon_grpc.core.request import OwnerLimits, Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.quotas import SharedQuotas
from tests.engine.harness import Harness, Setting


def reason(h: Harness, handle: int) -> str:
    failed = h.outcomes[handle].failed
    return failed.reason if failed is not None else ""


# -- places in the queue -----------------------------------------------------------------------------------------------


def test_in_a_full_queue_the_owner_with_the_most_gives_way() -> None:
    h = Harness(Setting(max_num_seqs=1, max_queue_size=6, fair=True))
    flood = [h.add([1, 2], 20, owner="flood")]
    h.step()
    flood += [h.add([1, 2], 20, owner="flood") for _ in range(6)]
    h.step()
    assert h.post.loads[-1].longest_queue == 6
    others = [h.add([3], 2, owner="other") for _ in range(4)]
    h.step()
    # Three and three: with one more of the other there would be fewer of the flood.
    assert [reason(h, handle) for handle in flood] == [""] * 4 + ["QUEUE_FULL"] * 3
    assert [reason(h, handle) for handle in others] == ["", "", "", "QUEUE_FULL"]
    assert h.outcomes[flood[-1]].failed.retry_after_s
    late = h.add([1], 2, owner="flood")
    h.run()
    assert reason(h, late) == "QUEUE_FULL" and h.idle()


def test_room_is_made_in_tokens_too_but_never_by_a_served_request() -> None:
    h = Harness(Setting(max_num_seqs=2, num_blocks=8, max_queued_tokens=40, fair=True))
    for _ in range(4):
        h.add(list(range(12)), 12, owner="flood", bypass_prefix_cache=True)
    small = h.add([5] * 10, 2, owner="other")
    while h.scheduler.num_preemptions == 0:
        h.step()
    late = [h.add([6 + at] * 20, 2, owner="third") for at in range(2)]
    h.run()
    begun = [outcome for outcome in h.outcomes.values() if outcome.ids]
    assert all(outcome.finished is not None for outcome in begun)
    assert h.outcomes[small].finished is not None and h.outcomes[late[0]].finished is not None


def test_long_prompts_do_not_take_the_places_of_many_short_ones() -> None:
    """The queue is full of tokens: who has fewer of them gives nothing."""
    h = Harness(Setting(max_num_seqs=1, max_queued_tokens=60, fair=True))
    h.add([1], 30, owner="many")
    h.step()
    short = [h.add([2, at], 2, owner="many") for at in range(8)]
    h.add([3] * 40, 2, owner="long")
    h.step()
    late = h.add([4] * 40, 2, owner="long")
    h.step()
    assert reason(h, late) == "QUEUE_FULL"
    assert [reason(h, handle) for handle in short] == [""] * 8


def test_no_request_is_displaced_for_one_that_still_would_not_fit() -> None:
    h = Harness(Setting(max_num_seqs=1, max_queued_tokens=40, fair=True))
    h.add([1], 30, owner="first")
    h.step()
    waiting = [h.add([2] * 18, 2, owner="first"), h.add([3] * 18, 2, owner="second")]
    h.step()
    late = h.add([4] * 30, 2, owner="third")
    h.step()
    assert [reason(h, handle) for handle in (*waiting, late)] == ["", "", "QUEUE_FULL"]


def test_work_done_without_competition_is_not_charged_later() -> None:
    h = Harness(Setting(max_num_seqs=1, num_blocks=64, fair=True))
    for _ in range(6):
        h.add([1], 60, owner="busy")
    h.run()
    flood = [h.add([2, at], 8, owner="flood") for at in range(20)]
    again = h.add([3], 2, owner="busy")
    while h.outcomes[again].finished is None:
        h.step()
    assert sum(h.outcomes[handle].finished is not None for handle in flood) <= 2


def test_without_fair_share_a_full_queue_refuses_every_newcomer() -> None:
    h = Harness(Setting(max_num_seqs=1, max_queue_size=2))
    for _ in range(3):
        h.add([1], 20, owner="flood")
        h.step()
    other = h.add([3], 2, owner="other")
    h.step()
    assert reason(h, other) == "QUEUE_FULL" and h.post.loads[-1].longest_queue == 0


def test_waiting_outputs_of_one_request_give_way_together() -> None:
    h = Harness(Setting(max_num_seqs=2, max_queue_size=8, fair=True))
    several = h.add(list(range(9)), 30, num_outputs=6, owner="flood")
    for _ in range(4):
        h.step()
    waiting = h.scheduler.live.num_queued
    assert waiting == 4
    for number in range(6):
        h.add([number], 2, owner="other")
    h.run()
    assert not any(reason(h, several + index) for index in range(6))


# -- quotas ------------------------------------------------------------------------------------------------------------


class TwoFrontEnds:
    """An engine, and requests of one owner that come to it by two ways."""

    def __init__(self, limits: OwnerLimits) -> None:
        self.now_s = 1000.0
        self.h = Harness(Setting(max_num_seqs=4), SharedQuotas(clock=lambda: self.now_s))
        self._limits = limits
        self._handles = {0: 0, 1: 0}

    def ask(self, frontend: int, num_prompt: int = 3, max_tokens: int = 4, **more: object) -> str:
        """Send one request and take a step; return how it was refused."""
        self._handles[frontend] += 1
        handle = self._handles[frontend]
        request = Request(
            request_id=str(more.pop("request_id", f"{frontend}-{handle}")),
            prompt_ids=tuple(range(num_prompt)),
            sampling=SamplingParams(),
            stop=StopParams(max_tokens),
            arrival_s=time.monotonic(),
            owner="key",
            limits=self._limits,
            **more,  # type: ignore[arg-type]
        )
        self.h.post.put(Add(handle, request), frontend)
        num_sent = len(self.h.post.sent)
        self.h.engine.step()
        frames = [frame for where, frame in self.h.post.sent[num_sent:] if where == frontend]
        return next((f.fault.reason for frame in frames for f in frame.failed if f.handle == handle), "")

    def run(self) -> None:
        while self.h.scheduler.live.has_work() or self.h.post.inbox:
            self.h.engine.step()

    def newest_fault(self):  # type: ignore[no-untyped-def]
        frames = [frame for _, frame in self.h.post.sent if isinstance(frame, StepFrame) and frame.failed]
        return frames[-1].failed[-1].fault


def test_requests_in_flight_are_counted_over_front_ends() -> None:
    service = TwoFrontEnds(OwnerLimits(max_concurrent=2))
    assert service.ask(0, max_tokens=200) == "" and service.ask(1, max_tokens=200) == ""
    assert service.ask(0) == service.ask(1) == "QUOTA_EXCEEDED"
    assert not service.newest_fault().is_final
    service.h.post.put(Abort((1,)), 1)
    service.h.engine.step()
    assert service.ask(0) == "" and service.ask(1) == "QUOTA_EXCEEDED"


def test_limits_of_owners_are_forgotten_in_time() -> None:
    now_s = 1000.0
    quotas = SharedQuotas(clock=lambda: now_s)
    for number in range(1000):
        request = Request(
            "r", (1, 2), SamplingParams(), StopParams(4), 0.0, owner=str(number), limits=OwnerLimits(2, 600)
        )
        quotas.check(request)
        quotas.admitted(request)
        quotas.ended(Sequence(request, 1, 0, 0, (0.0, 0)), is_last=True)
        now_s += 1.0
        assert len(quotas._limits) <= 200


def test_tokens_of_all_front_ends_come_out_of_one_bucket() -> None:
    service = TwoFrontEnds(OwnerLimits(tokens_per_minute=60))
    assert service.ask(0, 20, 10) == ""
    assert service.ask(1, 20, 10) == ""
    service.run()
    assert service.ask(0, 1) == service.ask(1, 1) == "QUOTA_EXCEEDED"
    service.now_s += 5
    assert service.ask(1, 5, 5) == ""


@pytest.mark.parametrize(
    ("num_prompt", "deadline_s", "is_final"), [(61, None, True), (30, 5.0, True), (30, 500, False)]
)
def test_a_refusal_that_waiting_cannot_help_is_final_across_the_bridge_too(
    num_prompt: int, deadline_s: float | None, is_final: bool
) -> None:
    service = TwoFrontEnds(OwnerLimits(tokens_per_minute=60))
    service.ask(0, 40, 1)
    more = {} if deadline_s is None else {"deadline_s": service.now_s + deadline_s}
    service.h.engine._check_deadline = lambda seq: None  # another clock than the quotas'
    assert service.ask(1, num_prompt, **more) == "QUOTA_EXCEEDED"
    assert service.newest_fault().error().is_final is is_final


def test_an_attempt_by_another_front_end_takes_the_place_of_the_first_and_its_share() -> None:
    service = TwoFrontEnds(OwnerLimits(max_concurrent=1))
    assert service.ask(0, max_tokens=200, request_id="same") == ""
    assert service.ask(1, max_tokens=200, request_id="same") == "DUPLICATE_REQUEST_ID"
    assert service.ask(1, max_tokens=200, request_id="same", replaces=True) == ""
    assert service.newest_fault().reason == "DUPLICATE_REQUEST_ID"
    assert service.ask(0) == "QUOTA_EXCEEDED"
    service.h.post.put(Abort((2,)), 1)
    service.h.engine.step()
    assert service.ask(0) == ""
