"""Reasoning and tool calls of the embedded model, in one program and through gRPC.

The model says what a test wants: `continue_from` gives the text but for its last token, `allowed_token_ids` that one.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from photon_grpc import LLM, demo
from photon_grpc.client import Client, Generation, ToolCall
from tests.frontend.answer_templates import QWEN3
from tests.server.test_answers import unnamed

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = '[{"type": "function", "function": {"name": "f"}}]'
BEGINNING = '<think>\nhm\n</think>So: <tool_call>\n{"name": "f", "arguments": {"a": ["é", {}]}}\n</tool_call'
CALL = ToolCall(0, "f", '{"a": ["é", {}]}')


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = tmp_path_factory.mktemp("answers") / "model"
    shutil.copytree(demo.TARGET, model, symlinks=True)
    Path(model / "chat_template.jinja").write_text(QWEN3)
    with LLM(model, device="cpu", max_num_seqs=4, num_blocks=64) as llm:
        yield llm


def ids(llm: LLM, text: str) -> tuple[int, ...]:
    tokenizer = llm._program._frontend._model.tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text, add_special_tokens=False)


def test_in_one_program(llm: LLM) -> None:
    given, end = ids(llm, BEGINNING), ids(llm, ">")
    forced = {"chat": True, "tools_json": TOOLS, "allowed_token_ids": end, "max_tokens": len(given) + 2}
    (whole,) = llm.generate([CHAT], continue_from=given, **forced)
    assert (whole.text, whole.reasoning, whole.content, unnamed(whole.tool_calls)) == (">>", "", ">", (CALL,))
    assert re.fullmatch("[0-9A-Za-z]{9}", whole.tool_calls[0].id)
    (first, *_) = deltas = list(llm.stream(CHAT, continue_from=given, **forced))
    assert (first.text, unnamed(first.tool_calls)) == (">", (CALL,))
    assert "".join(delta.content for delta in deltas) == ">"
    thinking = ids(llm, "<think")
    (thought,) = llm.generate([CHAT], continue_from=thinking, **forced | {"max_tokens": len(thinking) + 3})
    assert (thought.text, thought.reasoning, thought.content) == (">>>", ">>", "")


def test_through_grpc(llm: LLM, target: str) -> None:
    given, end = ids(llm, BEGINNING), ids(llm, ">")

    async def ask() -> Generation:
        async with Client(target) as client:
            options = {"tools_json": TOOLS, "allowed_token_ids": end, "max_tokens": len(given) + 1}
            return await client.generate(CHAT, continue_from=given, **options)  # type: ignore[arg-type]

    result = asyncio.run(ask())
    assert (result.text, result.content, unnamed(result.tool_calls)) == (">", "", (CALL,))
