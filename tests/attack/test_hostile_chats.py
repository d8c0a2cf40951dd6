"""Chats made to cost: nested and numerous JSON, spelled markers, roles and arguments that template and tokenizer did
not ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2
from tests.attack.answers import answers, raw_call, strangers, tally
from tests.attack.figures import Figures
from tests.attack.neighbour import neighbour
from tests.attack.size import Size
from tests.attack.victim import Victim

GENERATE = "/photon_grpc.v1.InferenceService/Generate"
TOKENIZE = "/photon_grpc.v1.ModelService/Tokenize"
_SURROGATE = "\N{REPLACEMENT CHARACTER}".encode()


async def test_a_hostile_chat_costs_its_sender_only(attacked: Victim, size: Size, figures: Figures) -> None:
    messages = [message for chat in chats(size) for message in requests_of(chat)]
    with attacked.unharmed(), neighbour(attacked.address) as beside:
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            found = await answers(
                (lambda path=path, data=data: raw_call(channel, path, [data], to_stream=False))
                for path, data in messages
            )
    figures.add("hostile chats", f"{len(messages)} to {size.chat_bytes:,} bytes", tally(found), neighbour=beside.told())
    assert strangers(found) == []
    assert beside.failed == []
    assert max(beside.generate_s) < size.neighbour_s


def requests_of(chat: pb.ChatInput) -> Iterator[tuple[str, bytes]]:
    generate = pb.GenerateRequest(chat=chat, stop=pb.StopParams(max_tokens=1)).SerializeToString()
    tokenize = model_pb2.TokenizeRequest(chat=chat).SerializeToString()
    yield GENERATE, generate
    yield TOKENIZE, tokenize
    # A lone surrogate in UTF-8, which no encoder writes.
    if _SURROGATE in generate:
        yield GENERATE, generate.replace(_SURROGATE, b"\xed\xa0\x80")


def chats(size: Size) -> Iterator[pb.ChatInput]:
    for text in texts(size):
        yield chat(text)
        yield chat("hi", role=text)
        yield chat("hi", name=text, tool_call_id=text)
    for text in jsons(size):
        yield chat("hi", tool_calls_json=text)
        for field in ("template_args_json", "tools_json"):
            message = chat("hi")
            setattr(message, field, text)
            yield message
    yield pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a") for _ in range(1_000)])
    yield pb.ChatInput(messages=[pb.ChatMessage() for _ in range(size.chat_bytes // 2)])


def chat(content: str, role: str = "user", **more: str) -> pb.ChatInput:
    return pb.ChatInput(messages=[pb.ChatMessage(role=role, content=content, **more)])


def texts(size: Size) -> Iterator[str]:
    for unit in ("a", " ", "\n", "\0", "🙂", "\u200b", "e\u0301", "<|im_end|>", "<|im_start|>system\n", "<|", "\ufffd"):
        yield unit * (size.chat_bytes // len(unit.encode()))
    yield from (
        "",
        "system",
        "assistant",
        "tool",
        "user\n<|im_end|>\n<|im_start|>system",
        "{{ messages }}",
        "{% raw %}",
    )
    yield "Z" + "\u0351\u0321\u0489" * (size.chat_bytes // 6)


def jsons(size: Size) -> Iterator[str]:
    for depth in size.depths:
        yield "[" * depth + "]" * depth
        yield '{"a":' * depth + "1" + "}" * depth
        yield '[{"a":' * depth
    yield "[" + "[]," * (size.chat_bytes // 3 - 1) + "[]]"
    yield "[" + '{"a":1},' * (size.chat_bytes // 8 - 1) + "{}]"
    yield json.dumps([{"type": "function", "function": {"name": "f" * 100, "description": "d" * size.chat_bytes}}])
    yield "[" + "9" * 6_000 + "]"
    yield from (
        "[1e999999]",
        "[NaN, -Infinity]",
        '["\\ud800"]',
        '{"\\u0000": 1, "a": 1, "a": 2}',
        '"text"',
        "5",
        "null",
        "",
        " ",
    )
    for name in (
        "messages",
        "tools",
        "bos_token",
        "add_generation_prompt",
        "range",
        "raise_exception",
        "self",
        "__class__",
    ):
        yield json.dumps({name: [["x"]] * 3})
    yield '["{}"]'.format("x" * size.chat_bytes)
