"""A step that fails before, during or after its changes.

Steps that are launched before it is read write into no block of others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import Admission, Batch, Growth
from photon_grpc.core.request import SamplingParams
from photon_grpc.runner import model_runner
from photon_grpc.runner.model_runner import ModelRunner
from tests.runner.models import greedy, model
from tests.runner.served import Served
from tests.runner.test_greedy import prompts

BLOCK_SIZE = 8


def served(**scheduler: Any) -> Served:
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=100)
    return Served(model("llama")[0], cache=cache, scheduler=SchedulerConfig(async_depth=1, **scheduler))


def fail_once(owner: object, name: str, *, is_applied: bool = False) -> None:
    """Make the next call raise, after doing its work if `is_applied`."""
    function: Callable[..., Any] = getattr(owner, name)

    def failing(*arguments: Any) -> Any:
        setattr(owner, name, function)
        if is_applied:
            function(*arguments)
        raise RuntimeError("out of memory, say")

    setattr(owner, name, failing)


#: What of a step fails, and whether its work is done then.
POINTS = [
    ("table", "apply", False),
    ("table", "_remember", True),
    ("table", "_numbers", False),
    ("table", "_grow", False),
    ("table", "apply", True),
    ("cache", "copy", False),
    ("", "launch_body", False),
    ("", "launch_body", True),
]


def admitted(slot: int, ids: tuple[int, ...], blocks: tuple[int, ...]) -> Admission:
    return Admission(slot, ids, len(ids), 0, (blocks,), SamplingParams(0.0))


@pytest.mark.parametrize(("owner", "name", "is_applied"), POINTS)
def test_rows_of_a_failed_step_are_not_computed_until_their_slots_are_given_anew(
    owner: str, name: str, is_applied: bool
) -> None:
    runner: ModelRunner = served().assembled.runner  # type: ignore[assignment]
    cells = runner.cache.pages[0]
    # Slots 1, 2 and 3 were others'; their blocks 1 to 6 belong to somebody else afterwards.
    tenants = tuple(admitted(slot, (slot, 5, 9), (2 * slot - 1, 2 * slot)) for slot in (1, 2, 3))
    runner.submit(Batch(1, (1, 2, 3), (3, 3, 3), (1, 1, 1), admissions=tenants))
    cells[1:].fill_(torch.nan)
    fail_once(getattr(runner, owner) if owner else runner, name, is_applied=is_applied)
    victims = admitted(1, (7,) * 6, (11, 12)), admitted(2, (8,) * 5, (13,))
    grown = (Growth(1, 0, 2, (15,)),)
    failed = runner.submit(Batch(2, (1, 2), (6, 5), (1, 1), left=(1, 2, 3), admissions=victims, grown=grown)).result()
    assert set(failed.faults) == {0, 1}
    newcomer = admitted(3, (4, 5, 9), (21,))
    before = cells.clone()
    behind = runner.submit(Batch(3, (1, 3, 2), (1, 3, 1), (1, 1, 1), admissions=(newcomer,))).result()
    assert {row: fault.message for row, fault in behind.faults.items()} == dict.fromkeys(
        (0, 2), "a step before this one could not be computed"
    )
    changed = (cells.nan_to_num(7.0) != before.nan_to_num(7.0)).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [21]
    fresh = served().assembled.runner
    expected = fresh.submit(Batch(1, (3,), (3,), (1,), admissions=(newcomer,))).result().ids
    assert behind.ids[1:2] == expected
    # Nobody but the poisoned: nothing is computed. Whoever is admitted to such a slot is.
    assert set(runner.submit(Batch(4, (2,), (1,), (1,))).result().faults) == {0}
    again = runner.submit(Batch(5, (2, 3), (3, 1), (1, 1), left=(2,), admissions=(admitted(2, (4, 5, 9), (22,)),)))
    assert again.result().ids[:1] == expected and not again.result().faults


ASKED = prompts(4, (20, 17, 33, 9, 30, 12))


@cache
def expected() -> list[list[int]]:
    """Return what the reference continues each of ASKED with."""
    return [greedy(model("llama")[1], prompt, 12) for prompt in ASKED]


@pytest.mark.parametrize(("owner", "name", "is_applied"), POINTS)
def test_requests_beside_and_behind_a_failed_step_say_what_they_say_alone(
    owner: str, name: str, is_applied: bool
) -> None:
    service = served(max_num_seqs=4)
    assert service.complete(ASKED, 12) == expected()
    runner = service.assembled.runner
    handles = [service.add(prompt, 12, num_outputs=2) for prompt in ASKED]
    for turn in range(4):
        if turn == 2:
            fail_once(getattr(runner, owner) if owner else runner, name, is_applied=is_applied)
        service.step()
    service.run()
    outputs = [service.outputs[handle + index] for handle in handles for index in (0, 1)]
    assert any(output.failed for output in outputs) and any(output.finished for output in outputs)
    for output, wanted in zip(outputs, [ids for ids in expected() for _ in (0, 1)], strict=True):
        assert output.ids == (wanted if output.finished else wanted[: len(output.ids)])
    assert service.complete(ASKED, 12) == expected(), "what is found in the cache was overwritten"


def test_a_device_that_a_kernel_of_another_library_found_lost_is_no_fault_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton tells of a lost device by a RuntimeError; whoever asks the device is told by torch's own error."""

    def lost(_: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    runner: ModelRunner = served().assembled.runner  # type: ignore[assignment]
    fail_once(runner, "launch_body")
    monkeypatch.setattr(model_runner, "wait_for", lost)
    with pytest.raises(torch.AcceleratorError):
        runner.submit(Batch(1, (1,), (3,), (1,), admissions=(admitted(1, (1, 5, 9), (1, 2)),)))
