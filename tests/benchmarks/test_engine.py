"""The benchmarks without a wire stand at both ends of the engine's bridge: they must keep up with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import alternate, energy, long_context, overhead, step_options
from benchmarks.engine import loaded


@pytest.mark.full
def test_the_embedded_model_brings_every_token_asked_for() -> None:
    with loaded("demo", ["--device", "cpu", "--num-blocks", "64"]) as work:
        seconds = work.run([[1, 2, 3], [4, 5]], [4, 2])
        assert seconds > 0 and work.num_tokens == 6 and not work.num_open
        assert sum(work.step_rows) == 6 and len(work.step_rows) == len(work.step_times_s)
        # At rest and awake again.
        assert work.run([[1, 2, 3]], [1]) > 0 and work.num_tokens == 1


@pytest.mark.full
def test_steps_of_a_long_context_are_those_that_brought_every_row_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "NUM_STEPS", 4)
    with loaded("demo", ["--device", "cpu", "--num-blocks", "64"]) as work:
        assert long_context.ttft_ms(work, 40, repeats=1) > 0
        assert long_context.step_ms(work, 40, rows=2, repeats=1) > 0
        assert work.step_rows.count(2) >= 4
        slots = work.facts.num_blocks * work.facts.kv.block_size
        assert list(long_context.that_fit(work, slots // 2 - long_context.CHUNK, [1, 2, 3])) == [1, 2]


def test_a_step_of_the_engine_alone_takes_time() -> None:
    for depth in (0, 1):
        assert min(overhead.measure(num_seqs=2, num_steps=5, depth=depth)) > 0


@pytest.mark.parametrize(
    "name",
    [
        "greedy",
        "greedy, penalties and biases",
        "greedy, masks that allow everything",
        "greedy, masks of a schema without maxLength",
        "greedy, masks of a schema, what is drawn",
        "temperature, everything",
    ],
)
@pytest.mark.full
def test_steps_of_every_option_take_time(name: str) -> None:
    with loaded("demo", ["--device", "cpu", "--num-blocks", "64"], has_tokenizer=True) as work, torch.inference_mode():
        step_options.prefill(work, num_rows=2, num_steps=3)
        variant = step_options.VARIANTS[name]
        assert step_options.step_ms(work, 2, 3, variant, variant.masks(work, 2)) > 0


def test_variants_are_chosen_by_parts_of_their_names_with_what_they_are_compared_with() -> None:
    assert [*step_options.chosen(["top_k", "scores 5", "logprobs 20"])] == [
        "greedy",
        "greedy, logprobs 20",
        "temperature",
        "temperature, top_k 50 and top_p of wide rows",
    ]
    assert step_options.chosen([]) == step_options.VARIANTS


@pytest.mark.full
def test_energy_is_what_the_meter_moved_while_tokens_came_out() -> None:
    readings = iter([10.0, 16.0])
    with loaded("demo", ["--device", "cpu", "--num-blocks", "64"]) as work:
        taken = energy.decoding(work, lambda: next(readings), batch=1, seconds=0.01)
    assert taken.num_tokens == 256 and taken.joules == 6.0
    assert taken.watts == pytest.approx(6.0 / taken.seconds)


@pytest.mark.full
def test_two_trees_are_measured_in_turns(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tree = str(Path(alternate.__file__).parents[1])
    sizes = ["--rounds", "1", "--batch", "1", "--prefill", "4", "--first", "8", "--mixed"]
    flags = ["--shape", "demo", *sizes, "--", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["alternate", "--before", tree, *flags])
    alternate.main()
    lines = capfd.readouterr().out.splitlines()
    assert [line.count("|") for line in lines[-3:]] == [5, 5, 5] and all(line.endswith("% |") for line in lines[-3:])
