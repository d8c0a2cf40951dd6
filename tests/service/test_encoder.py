"""Large inputs, encoded in a process: the same ids and errors as in a thread, and an end by caller or limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from photon_grpc.bridge.control import Begin
from photon_grpc.compose.served_model import read_served_model
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.ask import ChatInput, ChatMessage, ConstraintAsk, TextInput
from photon_grpc.core.call_form import TAGGED, CallForm
from photon_grpc.errors import EngineRestarting, InvalidConstraint, InvalidRequest, PhotonError
from photon_grpc.frontend.constraints import constraint
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.encoder_jobs import EncodeText
from photon_grpc.service.processes import encoder as encoder_process
from photon_grpc.service.processes.encoder_client import EncoderProcess

STAND_INS = Path(__file__).parent / "stand_ins"
ROOT = Path(__file__).resolve().parents[2]
MODEL = read_served_model(ServeConfig())
MiB = 2**20
#: Seconds of work.
LONG = TextInput(" " * 16 * MiB)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_INS), str(ROOT)]))
    monkeypatch.setattr("photon_grpc.service.processes.encoder_client._MODULE", "stand_in_encoder")


@pytest.fixture
async def encoder(stand_in: None) -> AsyncIterator[EncoderProcess]:
    async with running_encoder() as encoder:
        yield encoder


@contextlib.asynccontextmanager
async def running_encoder() -> AsyncIterator[EncoderProcess]:
    with ThreadPoolExecutor(1) as pool:
        async with EncoderProcess(ThreadEncoder(MODEL, pool), Begin(ServeConfig())).running() as running:
            yield running


def forks(encoder: EncoderProcess) -> list[int]:
    assert encoder.child is not None
    pid = encoder.child.pid
    return [int(fork) for fork in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110  # what another process does
            await asyncio.sleep(0.01)


async def outcome(work: Awaitable[object]) -> object:
    try:
        return await work
    except PhotonError as error:
        return error.reason, error.message, error.field, error.needed, error.limit


async def test_everything_is_as_in_a_thread(encoder: EncoderProcess) -> None:
    json = "[" + '{"a": [1, "x"]},' * 3000 + "0]"
    chats = [
        ChatInput((ChatMessage("user", "é <|im_end|> 🙂 " * 5000), ChatMessage("assistant", "ok"))),
        ChatInput((ChatMessage("user", "?"), ChatMessage("assistant", "", tool_calls_json=json)), tools_json=json),
        ChatInput((ChatMessage("user", "x" * 40_000),), template_args_json='{"unheard_of": 1}'),
        ChatInput((ChatMessage("user", "x" * 40_000, tool_calls_json="[" * 100 + "]" * 100),)),
        ChatInput(tuple([ChatMessage("user", "hi")] * 300)),
    ]
    texts = [TextInput("naïve 日本 🙂 def f():\n" * 3000), TextInput("<|im_end|>" * 9000, parse_special_tokens=True)]
    threads = encoder._threads
    for limit in (2**20, 100):
        for input in (*texts, *chats):
            assert await outcome(encoder.encode(input, limit)) == await outcome(threads.encode(input, limit)), input
    ids = tuple(range(5, 500)) * 30
    for skip in (True, False):
        assert await encoder.decode(ids, skip) == await threads.decode(ids, skip)


async def test_small_inputs_do_not_wait_for_the_process(encoder: EncoderProcess) -> None:
    long = asyncio.create_task(encoder.encode(LONG, 2**30))
    await until(lambda: bool(forks(encoder)))
    assert encoder.child is not None
    os.kill(encoder.child.pid, signal.SIGSTOP)
    for text in ("hello", "x" * 32 * 1024):
        assert await encoder.encode(TextInput(text), 2**20) == MODEL.tokenizer.encode(text)
    assert not long.done()
    long.cancel()


async def test_work_ends_with_its_call_and_the_process_stays(encoder: EncoderProcess) -> None:
    text = TextInput("word " * 10_000)
    expected = await encoder.encode(text, 2**20)
    pid = encoder.child.pid
    for _ in range(3):
        call = asyncio.create_task(encoder.encode(LONG, 2**30))
        await until(lambda: bool(forks(encoder)))
        call.cancel()
        await until(lambda: not forks(encoder))
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await encoder.encode(text, 2**20) == expected
    assert encoder.child.pid == pid


async def test_work_that_takes_too_long_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_CPU_S", "0.3")
    async with running_encoder() as encoder:
        with pytest.raises(InvalidRequest, match=r"more than 0.3 s of processor time") as caught:
            await encoder.encode(LONG, 2**30)
        assert (caught.value.field, caught.value.limit) == ("text", 0.3)
        assert await encoder.encode(TextInput("a" * 40_000), 2**20)


def test_work_that_takes_too_long_ends_where_the_refusal_reaches_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end is closed in the last moment; nothing else watches the work."""

    class Ended(BaseException):
        pass

    def end(code: int) -> NoReturn:
        raise Ended

    monkeypatch.setattr(encoder_process.os, "_exit", end)
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(Ended):
        encoder_process._watch(ours, EncodeText(TextInput("a"), 1), encoder_process._AnswerOnce(ours), 0.0)


async def test_work_that_needs_too_much_memory_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library ends its process where memory is short."""
    monkeypatch.setenv("STAND_IN_MEMORY_BYTES", str(96 * MiB))
    monkeypatch.setattr("photon_grpc.service.processes.encoder_client.max_memory_bytes", lambda num_bytes: 96 * MiB)
    async with running_encoder() as encoder:
        for input, field in ((LONG, "text"), (ChatInput((ChatMessage("user", "ab" * 4 * MiB),)), "chat")):
            with pytest.raises(InvalidRequest, match="more than 96 MiB") as caught:
                await encoder.encode(input, 2**30)
            assert (caught.value.field, caught.value.limit) == (field, 96)
        assert await encoder.encode(TextInput("a" * 40_000), 2**20)


async def test_a_killed_process_fails_what_it_did_and_is_replaced(encoder: EncoderProcess) -> None:
    call = asyncio.create_task(encoder.encode(LONG, 2**30))
    await until(lambda: bool(forks(encoder)))
    (fork,) = forks(encoder)
    killed = encoder.child.pid
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(EngineRestarting):
        await call
    assert await encoder.encode(TextInput("a" * 40_000), 2**20)
    assert encoder.child.pid != killed
    await until(lambda: not Path(f"/proc/{fork}/mem").exists() or _is_zombie(fork))


async def test_a_stopped_process_is_replaced(encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TextInput("a" * 40_000)
    ids = await encoder.encode(text, 2**20)
    assert encoder.child is not None
    stopped = encoder.child.pid
    os.kill(stopped, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr("photon_grpc.service.processes.encoder_client._MAX_SILENCE_S", 0.5)
        with pytest.raises(EngineRestarting):
            await encoder.encode(text, 2**20)
    await until(lambda: encoder.child is not None and encoder.child.pid != stopped)
    assert await encoder.encode(text, 2**20) == ids


async def test_a_killed_fork_fails_its_own_job_only(encoder: EncoderProcess) -> None:
    call = asyncio.create_task(encoder.encode(LONG, 2**30))
    await until(lambda: bool(forks(encoder)))
    os.kill(forks(encoder)[0], signal.SIGKILL)
    with pytest.raises(InvalidRequest, match="MiB"):
        await call
    assert await encoder.encode(TextInput("a" * 40_000), 2**20)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


#: What is written to break a compiler: stack, time and memory.
BOMBS = {
    "references": ConstraintAsk(
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/a0",
                "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(20_000)} | {"a20000": {}},
            }
        ),
    ),
    "tools": ConstraintAsk(
        "tool_calls",
        json.dumps(
            [
                {"name": "f"},
                {
                    "name": "g",
                    "parameters": {
                        "$ref": "#/$defs/a0",
                        "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(10_000)} | {"a10000": {}},
                    },
                },
            ]
        ),
        form=CallForm(TAGGED),
    ),
    "products": ConstraintAsk("json_schema", json.dumps({"type": "integer", "multipleOf": 999_983})),
    "nesting": ConstraintAsk("json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000),
    "combinations": ConstraintAsk(
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"type": "object", "properties": {f"p{i}": {"const": j}}} for j in range(4)]}
                    for i in range(12)
                ]
            }
        ),
    ),
    "a large schema": ConstraintAsk(
        "json_schema", json.dumps({"properties": {f"property{i}": {"type": "string"} for i in range(20_000)}})
    ),
    "repetitions": ConstraintAsk("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "groups": ConstraintAsk("regex", "(" * 200_000 + "a" + ")" * 200_000),
    "rules": ConstraintAsk(
        "grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(30_000)) + 'r30000: "a"'
    ),
    "terminals": ConstraintAsk(
        "grammar", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "a"'
    ),
    "alternatives": ConstraintAsk("grammar", "start: " + " | ".join(f'"lit{i}"' for i in range(60_000))),
    "readings": ConstraintAsk("grammar", "start: a\na: a a a a a a | b\nb: a | | b b b b b b b b\n"),
}


async def test_constraints_that_break_a_compiler_are_refused_and_the_process_stays(encoder: EncoderProcess) -> None:
    answer = await encoder.try_out(ConstraintAsk("regex", "a+"))
    assert answer.kind == "regex"
    child = encoder.child
    for name, bomb in BOMBS.items():
        with pytest.raises(InvalidConstraint) as caught:
            await encoder.try_out(bomb)
        assert caught.value.field == constraint.field_of(bomb), name
        assert len(caught.value.message) < 800
    assert encoder.child is child
    assert await encoder.try_out(ConstraintAsk("regex", "a+")) == answer


async def test_a_trial_ends_with_the_time_that_it_may_take(encoder: EncoderProcess) -> None:
    uris = {f"p{i}": {"type": "string", "format": "uri"} for i in range(800)}
    small = ConstraintAsk("json_schema", json.dumps({"properties": uris}))
    # Of what is large a caller has waited for its way here.
    for bomb, max_s in ((small, 0.08), (BOMBS["alternatives"], 0.05)):
        with pytest.raises(InvalidConstraint, match=rf"compiling it takes more than {max_s} s of processor time"):
            await encoder.try_out(bomb)
