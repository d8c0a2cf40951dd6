"""Every case of the front end's benchmark runs to its end: all readers are told."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import frontend


@pytest.mark.full
def test_every_case_has_a_figure() -> None:
    model = frontend.words_model(1024)
    for case in frontend.CASES:
        assert asyncio.run(asyncio.wait_for(frontend.measure(model, case, 2), 240)) > 0
