"""What the engine tells of itself: to everybody, in time, the last state always, and only when there is news."""

from __future__ import annotations

import socket
import time

import msgspec
import pytest

from photon_grpc.bridge.codec import UP, FrameReader, encode, max_frame_bytes
from photon_grpc.bridge.host import BridgeHost
from photon_grpc.core.frames import Abort, Add, Control, StepFrame
from photon_grpc.core.ports import EnginePorts
from photon_grpc.core.request import FinishReason, Request, SamplingParams, StopParams
from photon_grpc.core.stats import Load
from photon_grpc.engine.engine import Engine
from tests.engine.clock import Clock
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting

pytestmark = pytest.mark.usefixtures("windows")

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def at_rest(load: Load) -> bool:
    flows = (load.running, load.queued, load.queued_prompt_tokens, load.output_tokens_per_s, load.prompt_tokens_per_s)
    blocks = load.cached_blocks + load.free_blocks == load.total_blocks
    return not any(flows) and blocks and not (load.owned_blocks or load.limbo_blocks)


@DEPTHS
@pytest.mark.parametrize("ends", ["abort", "stop string", "operator", "max_tokens", "deadline"])
def test_the_last_load_sent_is_that_of_an_idle_engine(clock: Clock, depth: int, ends: str) -> None:
    h = Harness(Setting(depth=depth))
    handle = h.add([1, 2, 3], 5, deadline_s=time.monotonic() + 50 if ends == "deadline" else None)
    h.step()
    h.step()
    if ends in ("abort", "stop string"):
        h.post.put(Abort((handle,), by_stop_string=ends == "stop string"))
    elif ends == "operator":
        h.post.put(Control(1, "abort_requests"))
    elif ends == "deadline":
        clock.skip(60)
    h.run()
    last = h.post.loads[-1]
    assert at_rest(last) and last.total_blocks == h.pool.num_blocks
    failed, cancelled = int(ends == "deadline"), int(ends == "abort")
    assert (last.finished, last.failed, last.cancelled) == (1 - failed - cancelled, failed, cancelled)


def test_a_reset_of_the_prefix_cache_is_reported() -> None:
    h = Harness()
    h.add(list(range(20)), 2)
    h.run()
    assert h.post.loads[-1].cached_blocks == 5 * h.num_groups
    h.post.put(Control(1, "reset_prefix_cache"))
    h.run()
    assert h.post.loads[-1].cached_blocks == 0


def test_load_is_sent_at_a_bounded_rate_and_later_changes_follow() -> None:
    h = Harness(Setting(load_interval_s=1000.0))
    broadcaster, told = h.engine._broadcaster, h.post.loads
    h.step()
    assert len(told) == 1, "who is there at the start is told at once"
    h.add([1], 30)
    for _ in range(10):
        h.step()
    assert len(told) == 1
    assert broadcaster.due_s() is not None
    broadcaster.send(time.monotonic() + 1000)
    assert len(told) == 2 and told[-1].running == 1
    assert broadcaster.due_s() is None


def test_an_idle_engine_wakes_once_to_report_and_then_sleeps(clock: Clock) -> None:
    clock.stop()
    h = Harness(Setting(load_interval_s=0.02))
    h.add([1], 3)
    while h.scheduler.live.has_work() or h.post.inbox:
        h.step()
    h.step()
    assert h.post.waits[-1] == pytest.approx(0.02)
    clock.skip(0.02)
    h.run()
    assert h.post.waits[-1] is None
    assert at_rest(h.post.loads[-1])
    num_told = len(h.post.loads)
    clock.skip(0.02)
    h.abort(99)  # nobody
    h.run()
    assert h.post.waits[-1] is None and len(h.post.loads) == num_told, "what is as it was is not told again"


def test_the_front_end_of_a_request_hears_of_it_in_the_step_that_reads_it() -> None:
    h = Harness(Setting(max_num_batched_tokens=4, max_num_seqs=1))
    first = h.add(list(range(20)), 2)
    second = h.add([1], 2)
    h.step()
    frame = h.post.sent[-1][1]
    assert isinstance(frame, StepFrame) and not frame.handles
    assert frame.newest_added == second > first
    assert (frame.load.running, frame.load.queued) == (1, 1)


def test_a_front_end_that_asked_nothing_hears_of_the_requests_of_another() -> None:
    h = Harness()
    host = BridgeHost(None, max_frame_bytes=max_frame_bytes(1 << 20))
    pairs = [socket.socketpair() for _ in range(2)]
    for _, theirs in pairs:
        host.connect(theirs)
    engine = Engine(h.scheduler, h.runner, EnginePorts(host, host, h.post, load_interval_s=0.0), h.facts)
    (asking, idle) = (ours for ours, _ in pairs)
    request = Request("r", (1, 2, 3), SamplingParams(), StopParams(100), time.monotonic())
    asking.sendall(encode(Add(1, request)))
    for _ in range(4):
        engine.step()
    heard = loads(idle)
    assert (heard[-1].running, heard[-1].owned_blocks) == (1, 2 * h.num_groups) and heard[-1].output_tokens > 0
    asking.close()
    engine.step()
    assert at_rest(loads(idle)[-1])
    host.close()
    idle.close()


def test_rates_cover_working_time_and_the_drain_rate_is_remembered() -> None:
    h = Harness(Setting(max_num_seqs=1))
    stats = h.engine.stats
    for _ in range(4):
        h.add([1, 2], 3)
    for _ in range(4):
        h.step()
    stats._since_s -= 2.0  # the window began two seconds ago
    h.step()
    busy = h.post.loads[-1]
    assert busy.output_tokens_per_s > 0 and busy.ended_per_s == pytest.approx(0.5, rel=0.1)
    h.run()
    rest = h.post.loads[-1]
    assert at_rest(rest) and rest.ended_per_s == busy.ended_per_s
    assert msgspec.structs.replace(rest, queued=4).retry_after_s == pytest.approx(8, rel=0.1)
    # A night of rest is no slow drain.
    h.add([3], 3)
    h.step()
    assert h.post.loads[-1].ended_per_s == busy.ended_per_s


@DEPTHS
def test_each_output_is_counted_in_one_way_and_a_prompt_once(depth: int) -> None:
    h = Harness(Setting(depth=depth, max_queue_size=2))
    prompt = list(range(9))
    several = h.add(prompt, 6, num_outputs=3)
    h.add([1] * 300, 4)  # refused
    h.run()
    again = h.add(prompt, 30)
    for _ in range(3):
        h.step()
    h.post.put(Abort((again,), by_stop_string=True))
    gone = h.add([7], 30)
    h.step()
    h.abort(gone)
    h.run()
    load = h.post.loads[-1]
    assert h.outcomes[several].finished.reason is FinishReason.MAX_TOKENS
    assert (load.finished, load.failed, load.cancelled) == (4, 1, 1)
    started = bool(h.outcomes[gone].ids)
    assert (load.prompt_tokens, load.cached_prompt_tokens) == (18 + started, 8)


@DEPTHS
@pytest.mark.parametrize("steps", [0, 1])
def test_a_prompt_is_counted_where_its_first_output_left_before_a_token(depth: int, steps: int) -> None:
    """A second output has it computed, or finds it computed."""
    h = Harness(Setting(depth=depth, max_num_batched_tokens=4))
    several = h.add(list(range(9)), 3, num_outputs=3)
    for _ in range(steps):
        h.step()
    h.abort(several)
    h.run()
    assert not h.outcomes[several].ids and h.outcomes[several + 2].ids == complete(range(9), 3, index=2)
    load = h.post.loads[-1]
    assert (load.prompt_tokens, load.finished, load.cancelled) == (9, 2, 1)


def loads(sock: socket.socket) -> list[Load]:
    """Every Load that has come."""
    reader, frames = FrameReader(UP, max_bytes=max_frame_bytes(1 << 20)), []
    sock.setblocking(False)
    try:
        while data := sock.recv(1 << 16):
            frames += reader.feed(data)
    except BlockingIOError:
        pass
    assert all(isinstance(frame, Load) for frame in frames)
    return frames
