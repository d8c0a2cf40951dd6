"""Every case of the front end's benchmark runs to its end: all readers are told."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import frontend


@pytest.mark.full
def test_every_case_has_a_figure() -> None:
    spoken = {name: make(1024) for name, make in frontend.TOKENIZERS.items()}
    for case in (*frontend.SCORES, *frontend.TEXT):
        assert asyncio.run(asyncio.wait_for(frontend.measure(spoken[case.tokenizer], case, 2), 240)) > 0
