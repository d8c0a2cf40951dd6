"""The benchmarks without a wire stand at both ends of the engine's bridge: they must keep up with it."""

from __future__ import annotations

from benchmarks import overhead
from benchmarks.engine import loaded


def test_the_embedded_model_brings_every_token_asked_for() -> None:
    with loaded("demo", ["--device", "cpu", "--num-blocks", "64"]) as work:
        seconds = work.run([[1, 2, 3], [4, 5]], [4, 2])
        assert seconds > 0 and work.num_tokens == 6 and not work.num_open
        # At rest and awake again.
        assert work.run([[1, 2, 3]], [1]) > 0 and work.num_tokens == 1


def test_a_step_of_the_engine_alone_takes_time() -> None:
    for depth in (0, 1):
        assert min(overhead.measure(num_seqs=2, num_steps=5, depth=depth)) > 0
