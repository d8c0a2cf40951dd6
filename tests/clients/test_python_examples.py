"""Every example runs as its first lines describe and prints what it promises."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from photon_grpc import errors
from photon_grpc.client import Client, Options
from photon_grpc.v1 import inference_pb2 as pb
from tests.client.fake_server import message, serving_in_a_thread

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "clients" / "python"

PROMISED = {
    "generate.py": ["tokens, ended by", "first token after", ": logprob -", "refused: PROMPT_TOO_LONG"],
    "stream.py": ["-- ", "output_tokens"],
    "chat.py": ["user: def add(a, b):", "assistant: ", "user: def is_even(n):"],
    "cancel.py": [
        "left the loop",
        "cancelled the task: True",
        "deadline: DEADLINE_",
        "kept what there was: TIME_LIMIT",
    ],
    "structured.py": ["message: Usage", "so far: ", "object: Point(", "choice: "],
    "multiplex.py": ["-- 64 requests over one stream: 512 tokens, 0 failed"],
    "map.py": ["'def main():' -> ", "6: ", "refused, INVALID_REQUEST (text)"],
    "raw_stubs.py": [
        "FEATURE_TEXT",
        "FINISH_REASON_",
        " tokens",
        "reason INVALID_REQUEST of photon-grpc",
        "sampling.top_p",
    ],
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISED)


@pytest.mark.parametrize("name", PROMISED)
def test_an_example_runs(name: str, target: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for promise in PROMISED[name]:
        assert promise in done.stdout, done.stdout


def test_the_stubs_of_the_example_take_answers_above_the_limit_of_grpc(capsys: pytest.CaptureFixture[str]) -> None:
    text = "x" * 5 * 2**20
    with serving_in_a_thread([message(text, start=True, finish=pb.FINISH_REASON_EOS)]) as fake:
        runpy.run_path(str(EXAMPLES / "raw_stubs.py"))["main"](fake.target)
    assert text in capsys.readouterr().out


async def test_joined_deltas_are_the_whole_text(target: str) -> None:
    options: Options = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "token_ids": True}
    async with Client(target) as client:
        whole = await client.generate("def fib(n):", **options)
        deltas = [delta async for delta in client.stream("def fib(n):", **options)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert whole.usage.output_tokens == 24


async def test_ids_and_text_are_the_same_prompt(target: str) -> None:
    async with Client(target) as client:
        ids = await client.tokenize("import os")
        by_text = await client.generate("import os", max_tokens=8, temperature=0)
        by_ids = await client.generate(ids, max_tokens=8, temperature=0)
        assert await client.detokenize(ids) == "import os"
    assert by_text.text == by_ids.text


async def test_numbers_and_fields_of_a_refusal_arrive(target: str) -> None:
    async with Client(target) as client:
        context = (await client.model()).max_context_tokens
        with pytest.raises(errors.PromptTooLong) as raised:
            await client.generate("x", max_tokens=context + 1)
        with pytest.raises(errors.InvalidRequest, match="repetition_penalty"):
            await client.generate("x", max_tokens=1, repetition_penalty=0)
        with pytest.raises(errors.ModelNotFound):
            await client.generate("x", model="no-such-model")
    assert raised.value.limit == context
    assert raised.value.needed is not None
    assert raised.value.needed > context


async def test_many_requests_at_once_give_what_each_gives_alone(target: str) -> None:
    prompts = [f"def function_{index}(" for index in range(6)]
    async with Client(target) as client:
        alone = [(await client.generate(prompt, max_tokens=8, temperature=0)).text for prompt in prompts]
        calls = (client.generate(prompt, max_tokens=8, temperature=0) for prompt in prompts)
        together = await asyncio.gather(*calls)
    assert [result.text for result in together] == alone
