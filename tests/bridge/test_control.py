"""The control socket loses nothing, tears nothing and mixes nothing up, however little of it is taken at a time."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.bridge.control import CannotStart, ControlChannel, Link, LoadingProgress, Stop
from tests.examples import examples

#: Letters of a message; none: a Link with a socket. Some are longer than any buffer here.
MESSAGES = st.lists(st.one_of(st.none(), st.integers(0, 300), st.integers(0, 60_000)), min_size=1, max_size=30)
#: Seconds before each look.
STALLS = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.002]), min_size=1, max_size=10)


@contextmanager
def channels() -> Iterator[tuple[ControlChannel, ControlChannel]]:
    """To send and to receive, over the smallest buffer there is."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    sender, receiver = ControlChannel(ours), ControlChannel(theirs)
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def send_all(sender: ControlChannel, messages: list[int | None]) -> None:
    for number, size in enumerate(messages):
        if size is not None:
            sender.send(LoadingProgress("x" * size, number, 0))
            continue
        kept, passed = socket.socketpair()
        with kept, passed:
            kept.sendall(b"%d" % number)
            sender.send(Link(), passed)
    sender.send(Stop())


class Reading:
    """What came, in order."""

    def __init__(self, receiver: ControlChannel) -> None:
        self._receiver = receiver
        self.messages: list[int | None] = []
        self.is_over = False

    def look(self) -> None:
        for message in self._receiver.receive():
            if isinstance(message, Link):
                with self._receiver.take_socket() as sock:
                    assert int(sock.recv(100)) == len(self.messages), "the socket of another Link"
                self.messages.append(None)
            elif isinstance(message, LoadingProgress):
                assert message.done == len(self.messages)
                self.messages.append(len(message.stage))
            else:
                self.is_over = True


@given(MESSAGES, STALLS)
@settings(max_examples=examples(40), deadline=None)
def test_an_event_loop_sends_the_rest_when_there_is_room(messages, stalls):
    """As the supervisor does, and a front end."""

    async def run() -> list[int | None]:
        with channels() as (sender, receiver):
            sender.set_blocking(False)
            receiver.set_blocking(False)
            send_all(sender, messages)
            reading = Reading(receiver)
            while not reading.is_over:
                await asyncio.sleep(stalls[len(reading.messages) % len(stalls)])
                reading.look()
            return reading.messages

    num_open = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(run()) == messages
    assert len(os.listdir("/proc/self/fd")) == num_open


@given(MESSAGES, STALLS)
@settings(max_examples=examples(20), deadline=None)
def test_a_sender_that_may_wait_sends_everything(messages, stalls):
    """As the engine does while it loads."""
    with channels() as (sender, receiver):
        thread = threading.Thread(target=send_all, args=(sender, messages))
        thread.start()
        reading = Reading(receiver)
        while not reading.is_over:
            time.sleep(stalls[len(reading.messages) % len(stalls)])
            reading.look()
        thread.join()
        assert reading.messages == messages


async def test_a_peer_that_never_reads_costs_bounded_time_and_memory():
    with channels() as (sender, _):
        sender.set_blocking(False)
        num_open = len(os.listdir("/proc/self/fd"))
        lower, upper = socket.socketpair()
        with lower, upper, pytest.raises(BufferError):
            for _ in range(10_000):
                sender.send(Link(), lower)
        assert len(os.listdir("/proc/self/fd")) - num_open < 200
        sender.close()
        assert len(os.listdir("/proc/self/fd")) < num_open


async def test_a_peer_that_is_gone_is_sent_nothing_and_leaves_nothing():
    with channels() as (sender, receiver):
        sender.set_blocking(False)
        receiver.set_blocking(False)
        sender.send(CannotStart("x" * 50_000))
        assert receiver.receive() == []
        receiver.close()
        await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="Broken pipe"):
            sender.send(Stop())
