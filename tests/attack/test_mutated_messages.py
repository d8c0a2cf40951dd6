"""Broken messages on every method of every service, an operator's too: drawn by what the method takes, then its bytes
mutated."""

from __future__ import annotations

import random
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from photon_grpc.admin.v1 import admin_pb2
from photon_grpc.v1 import inference_pb2 as pb
from tests.attack.answers import UNSENT, Answer, answers, raw_call, strangers, tally
from tests.attack.figures import Figures
from tests.attack.mutation import broken, fill
from tests.attack.size import Size
from tests.attack.victim import Belongings, Victim, empty_request, path_of

#: Of the health service, which is not ours: a service that it does not know.
_OF_OTHERS = ("NOT_FOUND", UNSENT)
#: A message to it may be whole, and the service ends then.
_LETHAL = {"Drain"}
_MOST_MESSAGES = 6
_FAILURES_OF_OURS = (grpc.StatusCode.INTERNAL.value[0], grpc.StatusCode.UNKNOWN.value[0])


@pytest.mark.timeout(0)
async def test_a_broken_message_is_refused_or_answered_and_harms_nobody(
    attacked: Victim, size: Size, figures: Figures
) -> None:
    listed, operators = attacked.methods(), admin_methods()
    assert {method.containing_service.name for method in listed} >= {
        "InferenceService",
        "ModelService",
        "Health",
        "ServerReflection",
    }
    belongings = Belongings(attacked)
    with attacked.unharmed():
        found = [*await sent(attacked.address, listed, size), *await sent(attacked.admin, operators, size)]
    attacked.owns_nothing()
    belongings.return_to_what_they_were()
    what = f"{len(found):,}: {size.mutations:,} on each of {len(listed)} methods and {len(operators)} of operators"
    figures.add("mutated messages", what, tally(found), left_behind=belongings.told())
    # Most are refused, and some are still messages: the draw reaches all sides.
    assert {"MALFORMED_MESSAGE", "INVALID_REQUEST", "FEATURE_NOT_SUPPORTED", "OK"} <= set(tally(found))


def admin_methods() -> list[MethodDescriptor]:
    service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    return [method for method in service.methods if method.name not in _LETHAL]


async def sent(address: str, methods: list[MethodDescriptor], size: Size) -> list[Answer]:
    found: list[Answer] = []
    async with grpc.aio.insecure_channel(address) as channel:
        for method in methods:
            ended = await answers(attempts(channel, method, size.mutations))
            assert [*strangers(ended, *_OF_OTHERS), *failures(method, ended)] == [], method.full_name
            found += ended
    return found


def attempts(channel: grpc.aio.Channel, method: MethodDescriptor, count: int) -> Iterator[object]:
    draw = random.Random(method.full_name)
    for _ in range(count):
        num_messages = draw.randrange(1, 1 + _MOST_MESSAGES) if method.client_streaming else 1
        messages = [broken(fill(empty_request(method), draw).SerializeToString(), draw) for _ in range(num_messages)]
        yield lambda messages=messages: raw_call(channel, path_of(method), messages, to_stream=method.server_streaming)


def failures(method: MethodDescriptor, found: list[Answer]) -> Iterator[str]:
    """Items of shared streams that say that the server failed."""
    if method.name == "MultiplexGenerate":
        for message in (message for answer in found for message in answer.messages):
            for item in pb.MultiplexGenerateResponse.FromString(message).items:
                if item.error.code in _FAILURES_OF_OURS:
                    yield str(item)
