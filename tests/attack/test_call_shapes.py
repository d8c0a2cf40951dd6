"""Calls that no generated client makes: no message or two, wrong paths and types, headers without end, frames at odds
with each other."""

from __future__ import annotations

import asyncio
import struct

import grpc

from photon_grpc.v1 import inference_pb2
from tests.attack import http2
from tests.attack.answers import UNSENT, answers, raw_call, strangers, tally
from tests.attack.figures import Figures
from tests.attack.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    connected,
    frame,
)
from tests.attack.size import Size
from tests.attack.victim import Belongings, Victim, path_of

GENERATE = "/photon_grpc.v1.InferenceService/Generate"
MESSAGE = inference_pb2.GenerateRequest(text="def", stop=inference_pb2.StopParams(max_tokens=1)).SerializeToString()
DATA_OF_MESSAGE = http2.grpc_message(MESSAGE)
#: Longer than any client waits; a call that has no answer by then has none.
LIMIT_S = 5.0


def test_a_call_without_a_message_is_answered(attacked: Victim, figures: Figures) -> None:
    methods = [method for method in attacked.methods() if not method.client_streaming]
    with attacked.unharmed(), connected(attacked.address, LIMIT_S) as connection:
        streams = {2 * index + 1: path_of(method) for index, method in enumerate(methods)}
        for stream, path in streams.items():
            connection.call(stream, path, None)
        unanswered = dict(streams)
        try:
            for found in connection.frames():
                if found.ends_stream:
                    unanswered.pop(found.stream, None)
                if not unanswered:
                    break
        except TimeoutError:
            pass
    figures.add(
        "no message", f"HEADERS with END_STREAM to {len(methods)} methods", f"{len(methods) - len(unanswered)} answered"
    )
    assert unanswered == {}


async def test_two_messages_where_one_is_expected(attacked: Victim, figures: Figures) -> None:
    methods = [method for method in attacked.methods() if not method.client_streaming]
    with attacked.unharmed():
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            found = await answers(
                lambda method=method, last=last: raw_call(
                    channel, path_of(method), [b"", last], to_stream=method.server_streaming
                )
                for method in methods
                for last in (b"", b"\xff")
            )
    figures.add("two messages", f"two to each of {len(methods)} methods", tally(found))
    # gRPC reads the first, or refuses the call itself.
    assert strangers(found, UNSENT, "UNIMPLEMENTED", "NOT_FOUND") == []


async def test_paths_of_nothing(attacked: Victim, figures: Figures) -> None:
    paths = [
        GENERATE + "/",
        GENERATE.lower(),
        GENERATE[:-1],
        "//",
        "/",
        "/a/" + "b" * 4000,
        GENERATE + "%00",
        "/../" + GENERATE,
    ]
    with attacked.unharmed():
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            found = await answers(
                lambda path=path: raw_call(channel, path, [MESSAGE], to_stream=False) for path in paths
            )
    figures.add("wrong paths", f"{len(paths)}", tally(found))
    assert set(tally(found)) == {"UNIMPLEMENTED"}


async def test_huge_metadata(attacked: Victim, figures: Figures) -> None:
    given = [metadata for num_bytes in (7_000, 9_000, 17_000, 70_000) for metadata in metadata_of(num_bytes)]
    with attacked.unharmed():
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            found = await answers(
                lambda metadata=metadata: raw_call(channel, GENERATE, [MESSAGE], to_stream=False, metadata=metadata)
                for metadata in given
            )
    figures.add("huge metadata", f"7 to 70 KB, {len(given)}", tally(found))
    # gRPC refuses lists above 8 KiB, some at once and any above 16 KiB; a connection may go with it.
    assert strangers(found, "RESOURCE_EXHAUSTED", "UNAVAILABLE") == []


def metadata_of(num_bytes: int) -> list[list[tuple[str, str | bytes]]]:
    return [
        [("x-one", "v" * num_bytes)],
        [(f"x-{number}", "v" * 90) for number in range(num_bytes // 100)],
        [("x-request-id", "i" * num_bytes)],
        [("x-some-bin", b"\xff" * num_bytes)],
    ]


def lying_length(num_bytes: int) -> bytes:
    return struct.pack(">BI", 0, num_bytes) + MESSAGE


#: What is said on stream 1, in one go.
ONE_STREAM = {
    "a length beyond the end": frame(DATA, END_STREAM, 1, lying_length(len(MESSAGE) + 5)),
    "a length of 4 GiB": frame(DATA, END_STREAM, 1, lying_length(2**32 - 1)),
    "half a length": frame(DATA, END_STREAM, 1, b"\0\0"),
    "compressed, it says": frame(DATA, END_STREAM, 1, b"\1" + DATA_OF_MESSAGE[1:]),
    "flags that are none": frame(DATA, END_STREAM, 1, b"\xfe" + DATA_OF_MESSAGE[1:]),
    "a byte at a time": b"".join(frame(DATA, 0, 1, DATA_OF_MESSAGE[i : i + 1]) for i in range(len(DATA_OF_MESSAGE)))
    + frame(DATA, END_STREAM, 1),
    "headers twice": frame(HEADERS, END_HEADERS | END_STREAM, 1, http2.header_block(GENERATE)),
    "data after the end": frame(DATA, END_STREAM, 1, DATA_OF_MESSAGE) * 3,
}


#: Of those, the ones that leave the server without a message.
WITHOUT_MESSAGE = ("a length beyond the end", "half a length", "headers twice", "flags that are none")


def test_data_at_odds_with_itself(attacked: Victim, figures: Figures) -> None:
    said = {what: data for what, data in ONE_STREAM.items() if what not in WITHOUT_MESSAGE}
    with attacked.unharmed():
        unanswered = [what for what, data in said.items() if not is_answered(attacked, data)]
    figures.add("data at odds with itself", f"{len(said)} kinds", f"{len(said) - len(unanswered)} answered or closed")
    assert unanswered == []


def test_a_call_that_ends_within_its_message_is_answered(attacked: Victim, figures: Figures) -> None:
    with attacked.unharmed():
        unanswered = [what for what in WITHOUT_MESSAGE if not is_answered(attacked, ONE_STREAM[what])]
    figures.add("half a message", f"{len(WITHOUT_MESSAGE)} kinds", f"{len(WITHOUT_MESSAGE) - len(unanswered)} answered")
    assert unanswered == []


def is_answered(attacked: Victim, data: bytes) -> bool:
    """Return whether a call whose stream goes on with `data` is answered, or its connection closed."""
    with connected(attacked.address, LIMIT_S) as connection:
        connection.send(frame(HEADERS, END_HEADERS, 1, http2.header_block(GENERATE)))
        connection.send(data)
        return connection.is_answered(1)


HEADERS_THAT_MEAN_NOTHING = (
    {"content_type": "text/html"},
    {"content_type": "application/json"},
    {"content_type": ""},
    {"grpc_encoding": "no-such"},
    {"grpc_timeout": "soon"},
    {"grpc_timeout": "-1S"},
    {"grpc_timeout": "0n"},
    {"grpc_timeout": "99999999H"},
    {"grpc_previous_rpc_attempts": "x" * 50},
    {"x_request_id": "\x01\x7f"},
    {"traceparent": "00-" + "0" * 500},
)


def test_headers_that_mean_nothing(attacked: Victim, figures: Figures) -> None:
    unanswered = []
    with attacked.unharmed():
        for headers in HEADERS_THAT_MEAN_NOTHING:
            with connected(attacked.address, LIMIT_S) as connection:
                connection.call(1, GENERATE, DATA_OF_MESSAGE, **headers)
                if not connection.is_answered(1):
                    unanswered.append(headers)
    count = len(HEADERS_THAT_MEAN_NOTHING)
    figures.add("headers that mean nothing", f"{count}", f"{count - len(unanswered)} answered or closed")
    assert unanswered == []


def test_frames_without_end(attacked: Victim, size: Size, figures: Figures) -> None:
    """Resets at once after each request, headers that go on, settings, pings: the server may close such a connection,
    and serves others."""
    closed = []
    belongings = Belongings(attacked)
    with attacked.unharmed():
        for name, data in floods(size.cancels).items():
            with connected(attacked.address, 2.0) as connection:
                if not connection.send(data):
                    closed.append(name)
        for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" * 500, bytes(range(256)) * 64):
            with connected(attacked.address, 2.0) as connection:
                connection.send(garbage)
        belongings.return_to_what_they_were()
    told = f"closed at once: {', '.join(closed) or 'none'}"
    figures.add("frames without end", f"5 kinds, {size.cancels:,} each", told, left_behind=belongings.told())


def floods(count: int) -> dict[str, bytes]:
    block = http2.header_block(GENERATE)
    reset = struct.pack(">I", 8)
    streams = range(1, 2 * count, 2)
    begun = frame(HEADERS, 0, 1, block[:10])
    return {
        "rapid resets": b"".join(
            frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, reset) for stream in streams
        ),
        "headers that go on": begun + frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 100) * count,
        "settings": frame(SETTINGS) * count,
        "pings": frame(http2.PING, 0, 0, b"12345678") * count,
        "empty data": frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, 0, 1) * count,
    }


async def test_a_message_larger_than_any_may_be(attacked: Victim, figures: Figures) -> None:
    with attacked.unharmed():
        async with grpc.aio.insecure_channel(attacked.address, [("grpc.max_send_message_length", -1)]) as channel:
            (found,) = await asyncio.wait_for(
                answers([lambda: raw_call(channel, GENERATE, [bytes(33 << 20)], to_stream=False)]), 60
            )
    figures.add("a message of 33 MiB", "1", found.outcome)
    assert found.code == "RESOURCE_EXHAUSTED"
