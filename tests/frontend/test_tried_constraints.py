"""Each constraint is tried once, and the memory for the results is bounded."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.constraint import Constraint
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.constraint import write_grammar
from photon_grpc.frontend.tried_constraints import TriedConstraints


class Encoder:
    """An encoder whose trials wait for a signal and refuse `wrong`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def try_out(self, ask: ConstraintAsk, caller: str = "") -> Constraint:
        self.asked.append(ask.text)
        await self.may_answer.wait()
        if ask.text == "wrong":
            raise InvalidConstraint("wrong")
        return write_grammar(ask)


async def test_a_passed_trial_is_kept_and_a_failed_one_is_repeated() -> None:
    encoder = Encoder()
    constraints = TriedConstraints(encoder)
    first = await constraints.tried(ConstraintAsk("regex", "a+"))
    assert await constraints.tried(ConstraintAsk("regex", "a+")) is first
    for _ in range(2):
        with pytest.raises(InvalidConstraint):
            await constraints.tried(ConstraintAsk("regex", "wrong"))
    assert encoder.asked == ["a+", "wrong", "wrong"]


async def test_those_who_ask_for_the_same_share_a_trial_that_outlives_each_of_them() -> None:
    encoder = Encoder()
    constraints = TriedConstraints(encoder)
    encoder.may_answer.clear()
    one, other = [asyncio.create_task(constraints.tried(ConstraintAsk("regex", "a+"))) for _ in range(2)]
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    encoder.may_answer.set()
    assert await other == await constraints.tried(ConstraintAsk("regex", "a+"))
    assert encoder.asked == ["a+"]


async def test_new_constraints_of_one_caller_do_not_evict_those_of_another() -> None:
    encoder = Encoder()
    constraints = TriedConstraints(encoder, max_bytes=2**16)
    await constraints.tried(ConstraintAsk("regex", "mine"), "", "b")
    for number in range(200):
        await constraints.tried(ConstraintAsk("regex", f"{number}"), "", "a")
    encoder.asked.clear()
    await constraints.tried(ConstraintAsk("regex", "mine"), "", "b")
    assert not encoder.asked
    await constraints.tried(ConstraintAsk("regex", "0"), "", "a")
    assert encoder.asked == ["0"]


async def test_trials_are_not_shared_between_api_keys() -> None:
    encoder = Encoder()
    constraints = TriedConstraints(encoder)
    for owner in ("a", "b", "a"):
        await constraints.tried(ConstraintAsk("regex", "a+"), owner, owner)
    assert encoder.asked == ["a+", "a+"]


@pytest.mark.parametrize("num_choices", [2, 200])
async def test_the_memory_of_trials_is_bounded(num_choices: int) -> None:
    max_bytes = 2**18
    constraints = TriedConstraints(Encoder(), max_bytes)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1_600 // num_choices + 50):
            choices = tuple([f"{number}.{at}" for at in range(num_choices)])
            await constraints.tried(ConstraintAsk("choices", choices=choices))
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * max_bytes < taken < 1.25 * max_bytes
