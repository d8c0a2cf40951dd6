"""Broken messages on every method of every service that the server lists."""

from __future__ import annotations

import random
from collections.abc import Iterator

import grpc
from google.protobuf.descriptor import MethodDescriptor

from tests.attack.answers import UNSENT, Answer, answers, raw_call, strangers, tally
from tests.attack.figures import Figures
from tests.attack.mutation import broken, fill
from tests.attack.size import Size
from tests.attack.victim import Victim, empty_request, path_of

#: Of the health service, which is not ours: a service that it does not know.
_OF_OTHERS = ("NOT_FOUND", UNSENT)


async def test_a_broken_message_is_refused_or_answered_and_harms_nobody(
    attacked: Victim, size: Size, figures: Figures
) -> None:
    methods = attacked.methods()
    assert {method.containing_service.name for method in methods} >= {
        "InferenceService",
        "ModelService",
        "Health",
        "ServerReflection",
    }
    found: list[Answer] = []
    with attacked.unharmed():
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            for method in methods:
                found += await answers(attempts(channel, method, size.mutations))
    figures.add("mutated messages", f"{size.mutations:,} on each of {len(methods)} methods", tally(found))
    assert strangers(found, *_OF_OTHERS) == []
    # Most are refused, and some are still messages: the draw reaches both sides.
    assert {"MALFORMED_MESSAGE", "INVALID_REQUEST", "OK"} <= set(tally(found))


def attempts(channel: grpc.aio.Channel, method: MethodDescriptor, count: int) -> Iterator[object]:
    draw = random.Random(method.full_name)
    for _ in range(count):
        num_messages = draw.randrange(1, 4) if method.client_streaming else 1
        messages = [broken(fill(empty_request(method), draw).SerializeToString(), draw) for _ in range(num_messages)]
        yield lambda messages=messages: raw_call(channel, path_of(method), messages, to_stream=method.server_streaming)
