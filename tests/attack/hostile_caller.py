"""A caller that sends messages made to cost, one after the other, for a while, and then says what came back.

python -m tests.attack.hostile_caller ADDRESS NUM_BYTES SECONDS KIND…
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable

import grpc

from photon_grpc.v1 import inference_pb2, model_pb2
from tests.attack.answers import answer, raw_call

#: The deadline of every call: a caller that does not wait for what it asked.
_PATIENCE_S = 3.0
#: gRPC refuses more; the fields around the bulk take some.
_MESSAGE_LIMIT = (32 << 20) - 1024
_INFERENCE, _MODEL = "/photon_grpc.v1.InferenceService/", "/photon_grpc.v1.ModelService/"
_LARGEST_PART = 1 << 20


def _text(unit: str) -> Callable[[int], bytes]:
    return lambda num_bytes: _generate(text=unit * (num_bytes // len(unit.encode())))


def _generate(**given: object) -> bytes:
    return inference_pb2.GenerateRequest(stop=inference_pb2.StopParams(max_tokens=1), **given).SerializeToString()  # type: ignore[arg-type]


def _chat(num_bytes: int) -> inference_pb2.ChatInput:
    """JSON of very many nodes, in messages of a megabyte."""
    part = min(num_bytes, _LARGEST_PART)
    text = "[" + "[]," * (part // 3 - 20) + "[]]"
    messages = [
        inference_pb2.ChatMessage(role="user", content="a", tool_calls_json=text) for _ in range(num_bytes // part)
    ]
    return inference_pb2.ChatInput(messages=messages)


def _ids(num_bytes: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=[5]).FromString(b"\x0a" + _varint(num_bytes) + b"\x05" * num_bytes)


def _varint(number: int) -> bytes:
    return bytes((*((number >> shift & 127) | 128 for shift in (0, 7, 14, 21)), number >> 28))


#: name -> path and message of so many bytes.
KINDS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "spaces to Tokenize": (
        f"{_MODEL}Tokenize",
        lambda num_bytes: model_pb2.TokenizeRequest(text=" " * num_bytes).SerializeToString(),
    ),
    "spaces to Generate": (f"{_INFERENCE}Generate", _text(" ")),
    "one letter to StreamGenerate": (f"{_INFERENCE}StreamGenerate", _text("a")),
    "JSON to Generate": (f"{_INFERENCE}Generate", lambda num_bytes: _generate(chat=_chat(num_bytes))),
    "JSON to Tokenize": (
        f"{_MODEL}Tokenize",
        lambda num_bytes: model_pb2.TokenizeRequest(chat=_chat(num_bytes)).SerializeToString(),
    ),
    "ids to Generate": (f"{_INFERENCE}Generate", lambda num_bytes: _generate(token_ids=_ids(num_bytes))),
    "ids to Detokenize": (
        f"{_MODEL}Detokenize",
        lambda num_bytes: model_pb2.DetokenizeRequest(token_ids=_ids(num_bytes)).SerializeToString(),
    ),
    # Field 5 (chat) with num_bytes of field 1 (messages), each of no bytes.
    "empty messages to Generate": (
        f"{_INFERENCE}Generate",
        lambda num_bytes: b"\x2a" + _varint(num_bytes // 2 * 2) + b"\x0a\x00" * (num_bytes // 2),
    ),
}


async def _call_for(channel: grpc.aio.Channel, kind: str, num_bytes: int, seconds: float, told: Counter[str]) -> None:
    path, make = KINDS[kind]
    message = make(min(num_bytes, _MESSAGE_LIMIT))
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        call = raw_call(channel, path, [message], to_stream="Stream" in path, timeout=_PATIENCE_S)
        told[(await answer(call)).outcome] += 1


async def _main(address: str, num_bytes: str, seconds: str, *kinds: str) -> None:
    told: Counter[str] = Counter()
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        calls = (_call_for(channel, kind, int(num_bytes), float(seconds), told) for kind in kinds)
        await asyncio.gather(*calls)
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
