"""The share of completions that are Python, and of lines that repeat: counted as a reader would."""

from __future__ import annotations

import pytest

from benchmarks.embedded_model.completions import (
    Continuation,
    function_prompts,
    is_python,
    mean_body_lines,
    opening_prompts,
    repeated_share,
)

PROMPT = 'def total(items):\n    """Return the sum."""'
SOURCE = (
    PROMPT
    + "\n    result = 0\n    for item in items:\n        result += item\n    return result\n\n\nclass A:\n    pass\n"
)


@pytest.mark.parametrize(
    ("text", "has_ended", "expected", "num_lines"),
    [
        ("\n    return sum(items)\n", True, True, 1),
        ("\n    return sum(items)\n\nprint(total([1))", False, True, 1),
        ("\n    return sum(items)\n    x = (", False, True, 1),
        ("\n    return sum(items)\n    x = (", True, False, 2),
        ("\n    return sum(items", False, False, 0),
        ("\n  return\n      1", True, False, 2),
        ("", True, False, 0),
    ],
    ids=["ended", "next at the margin", "cut off", "ended wrong", "one line cut off", "indented wrong", "nothing"],
)
def test_a_completed_function_is_python_or_not(text: str, has_ended: bool, expected: bool, num_lines: int) -> None:
    continuation = Continuation(PROMPT, text, has_ended)
    assert is_python(continuation) == expected
    assert mean_body_lines([continuation]) == num_lines


def test_repeated_lines_are_those_that_stood_in_the_text_before() -> None:
    first = Continuation("import os\n", "import sys\nimport os\n\n    )\n    )\nimport sys", False)
    assert repeated_share([first]) == 2 / 3
    assert repeated_share([first, Continuation("", "a\nb\nc\n", True)]) == 2 / 6
    assert repeated_share([Continuation("a", "", True)]) == 0


def test_prompts_are_signatures_with_docstrings_and_the_same_each_time() -> None:
    other = SOURCE.replace("total", "count").replace('    """Return the sum."""\n', "")
    assert function_prompts([SOURCE, other]) == [PROMPT]
    many = [SOURCE.replace("total", f"total{number}") for number in range(200)]
    assert len(function_prompts(many)) == 100 and function_prompts(many) == function_prompts(many)


def test_openings_are_the_first_lines_of_files_long_enough() -> None:
    long = "".join(f"line_{number} = {number}\n" for number in range(60))
    (opening,) = opening_prompts([long, "x = 1\n"])
    assert long.startswith(opening + "\n") and opening.count("\n") == 11
