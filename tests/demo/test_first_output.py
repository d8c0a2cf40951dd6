"""The first text that a newcomer sees: varied, and Python."""

from __future__ import annotations

import ast

from photon_grpc import LLM
from photon_grpc.cli.first_run import OPTIONS, PROMPT


def test_the_first_text_is_python_that_hardly_repeats_itself() -> None:
    with LLM(device="cpu") as llm:
        text = PROMPT + llm.generate(PROMPT, **OPTIONS)[0].text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert len(lines) >= 10
    assert len(set(lines)) >= 0.8 * len(lines), text
    # The last line may have been cut by max_tokens.
    ast.parse(text[: text.rindex("\n")])
