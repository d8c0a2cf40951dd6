"""A rolling restart loses no call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.rolling_restart import NUM_REPLICAS, replaced_under_load
from tests.service.tiny import write_tiny_model


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_three_replicas_replaced_under_load_lose_no_call(tmp_path: Path) -> None:
    result = await replaced_under_load(write_tiny_model(tmp_path / "tiny"), num_callers=6, max_tokens=60)
    assert not result.failures, result.told()
    assert len(result.replaced_s) == NUM_REPLICAS and result.answered["unary"] and result.answered["stream"]
