"""A rolling restart loses no call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.rolling_restart import NUM_REPLICAS, replaced_under_load
from tests.service.running import WITH_MODEL, WITHOUT_MODEL
from tests.service.tiny import write_tiny_model


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "program",
    [pytest.param(WITHOUT_MODEL, id="modelless"), pytest.param(WITH_MODEL, id="model", marks=pytest.mark.full)],
)
async def test_three_replicas_replaced_under_load_lose_no_call(tmp_path: Path, program: tuple[str, ...]) -> None:
    result = await replaced_under_load(write_tiny_model(tmp_path / "tiny"), 3, 60, program)
    assert not result.failures, result.told()
    assert len(result.replaced_s) == NUM_REPLICAS and result.answered["unary"] and result.answered["stream"]
