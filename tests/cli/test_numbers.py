"""Flags that are numbers: what they refuse at once, and how they say what is allowed."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from photon_grpc.cli import main
from photon_grpc.cli.terminal.numbers import Number, WholeNumber


def flags_of(command: click.Command) -> Iterator[click.Parameter]:
    yield from command.params
    for nested in getattr(command, "commands", {}).values():
        yield from flags_of(nested)


def test_help_shows_bounds_only_if_there_are_any() -> None:
    for flag in flags_of(main.cli):
        if isinstance(flag, click.Option):
            described = (flag.get_help_record(click.Context(main.cli)) or ("", ""))[1]
            assert "None" not in described, flag.name


def test_help_shows_the_value_that_turns_an_option_off() -> None:
    flag = next(flag for flag in flags_of(main.cli) if flag.name == "top_k")
    assert (flag.get_help_record(click.Context(main.cli)) or ("", ""))[1].endswith("[x>=1, or -1 (off)]")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("generate x --top-k 0", "'--top-k': '0' is not a whole number of at least 1, or -1 (off)"),
        ("batch pyproject.toml out --top-k -2", "'--top-k': '-2' is not a whole number of at least 1, or -1 (off)"),
        ("generate x --presence-penalty abc", "'abc' is not a number in [-2, 2]"),
        ("generate x --presence-penalty 2.5", "'2.5' is not a number in [-2, 2]"),
        ("generate x --top-p 0", "'0' is not a number in (0, 1]"),
        ("generate x --temperature nan", "'nan' is not a number of at least 0"),
        ("generate x --max-tokens 1.5", "'1.5' is not a whole number of at least 1"),
        ("generate x --priority high", "'high' is not a whole number"),
        ("generate x --stop-token-id=-1", "'-1' is not a whole number of at least 0"),
        ("generate x --logit-bias 5=200", "'200' is not a number in [-100, 100]"),
        ("generate x --logit-bias 5", "'5' is not ID=X, such as 42=-1.5"),
        ("bench --rate 0", "'0' is not a number above 0"),
        ("health --timeout inf", "'inf' is not a number above 0"),
        ("keys new --weight 1001", "'1001' is not a whole number in [1, 1000]"),
        ("top --interval 100", "'100' is not a number in [0.1, 60]"),
    ],
)
def test_refused_number_is_shown_with_the_allowed_ones(
    command: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(command.split()) == 2
    assert capsys.readouterr().err.endswith(f"{error}\n")


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (WholeNumber(1, off=-1), "-1", -1),
        (WholeNumber(1, off=-1), "1", 1),
        (WholeNumber(0, 5), "5", 5),
        (Number(0, 1, is_open=True), "1", 1.0),
        (Number(-2, 2), "-2", -2.0),
    ],
)
def test_bounds_and_the_value_that_means_off_are_accepted(kind: click.ParamType, text: str, value: float) -> None:
    assert kind.convert(text, None, None) == value


def test_no_flag_has_an_error_in_the_words_of_click() -> None:
    numbers = (click.types.IntParamType, click.types.FloatParamType)
    foreign = [
        each.name
        for each in flags_of(main.cli)
        if isinstance(each.type, numbers) and not isinstance(each.type, WholeNumber | Number)
    ]
    assert not foreign, "use WholeNumber or Number of cli/terminal/numbers.py"
