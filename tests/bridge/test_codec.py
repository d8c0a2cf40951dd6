from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.bridge.codec import DOWN, UP, FrameError, FrameReader, encode, max_frame_bytes
from photon_grpc.core.engine_picture import EnginePicture, Lane, StepWork
from photon_grpc.core.frames import Abort, Add, Control, Facts, Failed, Finished, Reply, StepFrame, Watch
from photon_grpc.core.request import FinishReason, Request, SamplingParams, StopParams
from photon_grpc.core.stats import Load
from photon_grpc.errors import QueueFull
from tests.examples import examples
from tests.kv_plans import kv_plan

MAX_BYTES = max_frame_bytes(32 * 1024 * 1024)


def request(prompt_ids: tuple[int, ...] = (1, 2, 3), num_outputs: int = 1) -> Request:
    return Request("r", prompt_ids, SamplingParams(seed=2**64 - 1), StopParams(8), 1.5, num_outputs=num_outputs)


DOWNS = [
    Add(7, request()),
    Add(8, request(tuple(range(5000)), num_outputs=3)),
    Abort((1, 2, 2**40)),
    Abort((1,), by_stop_string=True),
    Control(1, "reset_prefix_cache", ("a", "ü")),
    Watch(is_on=True),
]
UPS = [
    Facts(4096, 4096, kv_plan(16, 0, 128), 100, 64, 2048, 1024, 1 << 20, "cpu", "float32"),
    StepFrame(
        9,
        (7, 8, 8),
        (1, 2, 3),
        (Finished(7, FinishReason.EOS, 1, 0, 0.25),),
        (Failed.of(9, QueueFull("full", needed=5, limit=4, retry_after_s=0.5)),),
        Load(running=2, step_s=0.01),
    ),
    StepFrame(10, (), (), (), (), Load(), preempted=(3, 3), newest_added=8),
    StepFrame(11, (3, 4), (5, 6), (), (), Load(), logprobs={4: bytes(24)}, prompt_logprobs={3: bytes(36)}),
    Load(running=1, cancelled=2),
    Reply(1, 3, ("a",)),
    EnginePicture(1.5, (StepWork(0.002, 7, 1),), 2, (Lane(3, 9, 12, 8, 12, 2, 4, 1, 5),), Load(queued=3)),
]


@pytest.mark.parametrize(("frames", "decoder"), [(DOWNS, DOWN), (UPS, UP)])
def test_a_frame_is_read_as_it_was_written(frames, decoder):
    reader = FrameReader(decoder, max_bytes=MAX_BYTES)
    assert reader.feed(b"".join(map(encode, frames))) == frames
    assert not reader.is_partial


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.sampled_from(range(len(DOWNS))), max_size=40), st.data())
def test_any_split_of_the_bytes_gives_the_same_frames(choice, data):
    sent = [DOWNS[i] for i in choice]
    stream = b"".join(map(encode, sent))
    reader = FrameReader(DOWN, max_bytes=MAX_BYTES)
    got = []
    while stream:
        count = data.draw(st.integers(1, min(len(stream), 9000)))
        room = reader.room()
        assert len(room)
        count = min(count, len(room))
        room[:count] = stream[:count]
        del room
        got += reader.advance(count)
        stream = stream[count:]
    assert got == sent
    assert not reader.is_partial


def test_a_prompt_of_a_million_ids_passes_and_its_memory_is_given_back():
    reader = FrameReader(DOWN, max_bytes=MAX_BYTES)
    long = Add(1, request(tuple(range(200_000, 1_200_000))))
    assert reader.feed(encode(long) + encode(DOWNS[0])) == [long, DOWNS[0]]
    assert len(reader.room()) <= 1 << 20


def test_an_unfinished_frame_is_known():
    reader = FrameReader(DOWN, max_bytes=MAX_BYTES)
    assert reader.feed(encode(DOWNS[0])[:-1]) == []
    assert reader.is_partial


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("<I", 2**31), "a frame of 2147483648 bytes exceeds the limit of"),
        (b"\x05\x00\x00\x00hello", "5 bytes are not a frame"),
        (b"\x00\x00\x00\x00", "0 bytes are not a frame"),
        (encode(Facts(1, 1, kv_plan(1), 1, 1, 1, 1, 1, "cpu", "float32")), "not a frame"),
        (encode([1, "not a handle", None]), "not a frame"),
    ],
)
def test_bytes_that_are_not_a_frame_are_a_clear_error(data, text):
    with pytest.raises(FrameError, match=text):
        FrameReader(DOWN, max_bytes=MAX_BYTES).feed(data)


@settings(deadline=None, max_examples=examples(100))
@given(st.binary(max_size=200))
def test_garbage_is_a_frame_error_or_nothing(data):
    reader = FrameReader(UP, max_bytes=1000)
    try:
        reader.feed(data)
    except FrameError:
        return
