"""Turns between callers: the waiting jobs of one caller delay no other, only the jobs that have begun do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from photon_grpc.core.ask import ConstraintAsk, TextInput
from photon_grpc.errors import QueueFull
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.fair_turns import FairTurns
from photon_grpc.frontend.output.output import OutputText
from photon_grpc.frontend.tried_constraints import TriedConstraints
from tests.frontend.fake_engine import FACTS, FakeLink, ask, frontend, served

MiB = 2**20


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110  # what a thread does
            await asyncio.sleep(0.001)


class Bench:
    """Jobs that end on demand; `begun` lists the callers in the order of their turns."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns = turns
        self.begun: list[str] = []
        self.refused: list[str] = []
        self._running: list[asyncio.Event] = []

    def ask(self, caller: str, num_bytes: int = 1) -> asyncio.Task[None]:
        return asyncio.create_task(self._job(caller, num_bytes))

    async def end_one(self) -> None:
        self._running.pop(0).set()
        await settled()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def _job(self, caller: str, num_bytes: int) -> None:
        try:
            async with self.turns.turn(caller, num_bytes):
                end = asyncio.Event()
                self.begun.append(caller)
                self._running.append(end)
                await end.wait()
        except QueueFull:
            self.refused.append(caller)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def bench(num_workers: int, *, max_jobs: int = 10**4, max_bytes: int = 2**40, large_bytes: int | None = None) -> Bench:
    return Bench(FairTurns(num_workers, "jobs wait", max_jobs=max_jobs, max_bytes=max_bytes, large_bytes=large_bytes))


@pytest.mark.parametrize("num_workers", [1, 2, 4])
async def test_a_single_job_waits_only_for_running_jobs_of_another_caller(num_workers: int) -> None:
    jobs = bench(num_workers)
    others = [jobs.ask("a", 50) for _ in range(1000)]
    await settled()
    single = jobs.ask("b", 50)
    await settled()
    await jobs.end_one()
    assert jobs.begun == [*["a"] * num_workers, "b"]
    for task in (single, *others):
        task.cancel()
    await asyncio.gather(single, *others, return_exceptions=True)
    assert len(jobs.turns) == 0


async def test_work_is_shared_by_its_size_and_not_by_its_number() -> None:
    jobs = bench(1)
    tasks = [jobs.ask("large", MiB) for _ in range(10)] + [jobs.ask("small", 2**12) for _ in range(100)]
    await settled()
    for _ in range(60):
        await jobs.end_one()
    assert jobs.begun.count("large") == 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_absent_caller_earns_no_credit() -> None:
    jobs = bench(1)
    tasks = [jobs.ask("a") for _ in range(20)]
    await settled()
    for _ in range(10):
        await jobs.end_one()
    tasks += [jobs.ask("b") for _ in range(20)]
    await settled()
    for _ in range(6):
        await jobs.end_one()
    assert sorted(jobs.begun[-6:]) == ["a"] * 3 + ["b"] * 3
    while jobs.num_running:
        await jobs.end_one()
    assert len(jobs.turns) == jobs.turns.num_callers == 0
    await asyncio.gather(*tasks)


async def test_without_room_the_newest_job_of_the_caller_with_most_is_displaced() -> None:
    jobs = bench(1, max_jobs=5)
    tasks = [jobs.ask("a") for _ in range(5)]
    await settled()
    tasks += [jobs.ask("a"), jobs.ask("b"), jobs.ask("b"), jobs.ask("b")]
    await settled()
    # The sixth job of a is refused; two of its five are displaced by b, which may not have more than a.
    assert sorted(jobs.refused) == ["a", "a", "a", "b"]
    while jobs.num_running:
        await jobs.end_one()
    assert sorted(jobs.begun) == ["a", "a", "a", "b", "b"]
    await asyncio.gather(*tasks)


async def test_room_in_bytes_is_made_by_the_one_with_most_bytes() -> None:
    jobs = bench(1, max_bytes=100)
    tasks = [jobs.ask("a", 40), *[jobs.ask("a", 30) for _ in range(2)]]
    await settled()
    tasks += [jobs.ask("b", 60), jobs.ask("b", 20)]
    await settled()
    assert jobs.refused == ["b", "a"], "60 would be more than a has left; 20 are not"
    while jobs.num_running:
        await jobs.end_one()
    await asyncio.gather(*tasks)


async def test_what_waits_leaves_with_its_call_and_callers_are_forgotten() -> None:
    jobs = bench(1)
    first = jobs.ask("a")
    await settled()
    waiting = [jobs.ask(f"peer {number}") for number in range(3000)]
    await settled()
    assert len(jobs.turns) == 3001
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(jobs.turns) == 1
    later = [jobs.ask("b"), jobs.ask("c")]
    await settled()
    assert jobs.turns.num_callers <= 1024 + 4
    await jobs.end_one()
    assert jobs.begun == ["a", "b"]
    while jobs.num_running:
        await jobs.end_one()
    await asyncio.gather(first, *later)


@pytest.mark.parametrize("seed", range(5))
async def test_no_order_of_jobs_and_cancellations_leaks(seed: int) -> None:
    draw = random.Random(seed)
    jobs = bench(3, max_jobs=20, max_bytes=4000, large_bytes=500)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(300):
        match draw.randrange(4):
            case 0 | 1:
                tasks.append(jobs.ask(draw.choice("abcd"), draw.randrange(1000)))
            case 2 if jobs.num_running:
                await jobs.end_one()
            case 3 if tasks:
                draw.choice(tasks).cancel()
        await settled()
        assert len(jobs.turns) <= 20
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(jobs.turns) == jobs.turns.num_callers == 0


async def test_the_smallest_goes_first_and_large_ones_one_at_a_time() -> None:
    turns = FairTurns(2, "inputs wait", max_jobs=256, max_bytes=2**27, large_bytes=MiB)
    begun: list[int] = []
    gates: dict[int, asyncio.Event] = {}

    async def job(num_bytes: int) -> None:
        async with turns.turn("a", num_bytes):
            begun.append(num_bytes)
            await gates.setdefault(num_bytes, asyncio.Event()).wait()

    tasks = {size: asyncio.create_task(job(size)) for size in (9 * MiB, 3 * MiB, 5, 8 * MiB, 7, 6)}
    await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert begun == [9 * MiB, 5]  # who came first found room; of the large ones no second
    gates[5].set()
    await until(lambda: len(begun) == 3)
    tasks[7].cancel()
    gates[6].set()
    gates.setdefault(9 * MiB, asyncio.Event()).set()
    await until(lambda: len(begun) == 4)
    assert begun == [9 * MiB, 5, 6, 3 * MiB]
    tasks[3 * MiB].cancel()
    await until(lambda: len(begun) == 5)
    assert begun[-1] == 8 * MiB
    gates[8 * MiB].set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert len(turns) == turns.num_callers == 0


async def test_what_waits_is_bounded_in_jobs_and_bytes() -> None:
    turns = FairTurns(1, "inputs wait", max_jobs=3, max_bytes=100)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(turns.turn("a", 1000))  # alone, anything
        with pytest.raises(QueueFull, match="bytes") as caught:
            await stack.enter_async_context(turns.turn("a", 1))
        assert (caught.value.needed, caught.value.limit) == (1001, 100)
        assert caught.value.retry_after_s
    waiting = []
    async with turns.turn("a", 1):
        waiting = [asyncio.create_task(turns.turn("a", 1).__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="inputs") as caught:
            await stack.enter_async_context(turns.turn("a", 1))
        assert (caught.value.needed, caught.value.limit) == (4, 3)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    async with turns.turn("a", 100):
        pass


class Gate:
    """A gate that releases one piece of work in a thread at a time, and records what has begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._turns = threading.Semaphore(0)

    def work(self, name: str) -> None:
        self.begun.append(name)
        if not self._turns.acquire(timeout=30):
            raise TimeoutError

    def let_go(self, count: int = 1) -> None:
        self._turns.release(count)


async def cancelled(tasks: list[asyncio.Task[object]], gate: Gate) -> None:
    for task in tasks:
        task.cancel()
    gate.let_go(1000)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_small_text_does_not_wait_for_a_thousand_of_another_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs that the pool already has, twice as many as its threads, begin before it."""
    gate = Gate()
    monkeypatch.setattr("photon_grpc.frontend.encoder.encode", lambda input, *rest: gate.work(input.text))
    with ThreadPoolExecutor(2) as pool:
        encoder = ThreadEncoder(served(), pool, max_at_once=4)
        tasks: list[asyncio.Task[object]] = [
            asyncio.create_task(encoder.encode(TextInput("a"), 99, "a")) for _ in range(1000)
        ]
        await until(lambda: len(gate.begun) == 2)
        tasks.append(asyncio.create_task(encoder.encode(TextInput("b"), 99, "b")))
        while "b" not in gate.begun:
            num_begun = len(gate.begun)
            gate.let_go()
            await until(lambda num_begun=num_begun: len(gate.begun) > num_begun)  # type: ignore[misc]
        assert gate.begun == [*"aaaab"]
        await cancelled(tasks, gate)


async def test_work_of_callers_that_left_does_not_occupy_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr("photon_grpc.frontend.encoder.encode", lambda input, *rest: gate.work(input.text))
    with ThreadPoolExecutor(1) as pool:
        encoder = ThreadEncoder(served(), pool, max_at_once=2)
        for _ in range(100):
            left = asyncio.create_task(encoder.encode(TextInput("a"), 99, "a"))
            await settled()
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        await until(lambda: len(gate.begun) == 1)
        stays: asyncio.Task[object] = asyncio.create_task(encoder.encode(TextInput("b"), 99, "b"))
        await settled()
        gate.let_go()
        await until(lambda: len(gate.begun) == 2)
        assert gate.begun == ["a", "b"]
        await cancelled([stays], gate)


async def test_a_trial_waits_only_for_its_callers_jobs_and_ends_with_the_last_waiter() -> None:
    jobs = bench(1)

    class Encoder:
        async def try_out(self, ask: ConstraintAsk, caller: str = "") -> None:
            await jobs._job(caller, len(ask.text))

    constraints = TriedConstraints(Encoder())  # type: ignore[arg-type]
    tasks = [asyncio.create_task(constraints.tried(ConstraintAsk("regex", f"{n}"), "", "a")) for n in range(200)]
    await settled()
    # b asks for the same as the last job of a and does not wait for a's turn.
    other = asyncio.create_task(constraints.tried(ConstraintAsk("regex", "199"), "", "b"))
    await settled()
    await jobs.end_one()
    assert jobs.begun == ["a", "b"]
    for task in (*tasks, other):
        task.cancel()
    await asyncio.gather(*tasks, other, return_exceptions=True)
    await settled()
    assert len(jobs.turns) == 0 and not constraints._running


async def test_a_continued_output_does_not_wait_for_those_of_another_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are replayed on the event loop, one slice in each of its turns."""
    replayed: list[int] = []
    replay = OutputText.replay

    def count(output: OutputText, ids: tuple[int, ...]) -> None:
        replayed.append(ids[0])
        replay(output, ids)

    monkeypatch.setattr(OutputText, "replay", count)
    facts = msgspec.structs.replace(FACTS, max_queue_size=1000, max_queued_tokens=10**6)
    with frontend(link=FakeLink(facts)) as (front, _):
        many = [asyncio.create_task(front.stream(ask((5,), continue_from=(7,) * 9, caller="a"))) for _ in range(100)]
        one = asyncio.create_task(front.stream(ask((5,), continue_from=(8,) * 9, caller="b")))
        before = 0
        while not one.done():
            await asyncio.sleep(0)
            assert len(replayed) - before <= 1
            before = len(replayed)
        assert replayed.index(8) <= 1
        await asyncio.gather(*many)
