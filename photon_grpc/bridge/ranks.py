"""Messages between the engine process, which is rank 0, and the other ranks, over one socket pair each.

Rank 0 decides, the other ranks compute. Before the first step they take minimums over all ranks (`RankValue`,
`Minimum`). Frames are encoded as between engine and front end; shared memory is passed by file descriptor (SCM_RIGHTS).
"""

from __future__ import annotations

import mmap
import os
import socket
from collections import deque

import msgspec

from photon_grpc.bridge.codec import MAX_STEP_BYTES, FrameReader, encode
from photon_grpc.bridge.heartbeat import shared_file
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.batch import Batch

_MAX_BYTES = 128 * 1024
_MAX_FILES = 4


class BeginRank(msgspec.Struct, frozen=True, array_like=True, tag=60):
    """To a rank: the first message."""

    config: ServeConfig
    rank: int


class RankValue(msgspec.Struct, frozen=True, array_like=True, tag=61):
    """From a rank: its value for the next Minimum. All ranks send equally many, in the same order."""

    number: int


class Minimum(msgspec.Struct, frozen=True, array_like=True, tag=62):
    """To a rank: the minimum of the values of all ranks."""

    number: int


class RankRefused(msgspec.Struct, frozen=True, array_like=True, tag=63):
    """From a rank: the text of a StartupError, its last message."""

    message: str


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """To a rank: launch this step."""

    batch: Batch


class NewMaskMemory(msgspec.Struct, frozen=True, array_like=True, tag=65):
    """To a rank: memory for masks, whose file comes with the message. Ranks number them from 0 in this order."""

    num_bytes: int


class SampleMasked(msgspec.Struct, frozen=True, array_like=True, tag=66):
    """To a rank: launch the sampling of the last step with the masks at the start of a memory."""

    memory: int
    num_bytes: int


class ReadStep(msgspec.Struct, frozen=True, array_like=True, tag=67):
    """To a rank: read the oldest step with drafts, as rank 0 does now."""


RankMessage = BeginRank | RankValue | Minimum | RankRefused | Launch | NewMaskMemory | SampleMasked | ReadStep
_DECODER: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


class RankChannel:
    """One end of the blocking socket between rank 0 and another rank."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader(_DECODER, max_bytes=MAX_STEP_BYTES)
        self._messages: deque[RankMessage] = deque()
        self._files: deque[int] = deque()

    def send(self, message: RankMessage) -> None:
        """Send a message. Raise OSError if the other end is closed."""
        self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes, file: int | None = None) -> None:
        """Send an encoded message, with a file if there is one."""
        files = [] if file is None else [file]
        sent = socket.send_fds(self._socket, [frame], files)
        self._socket.sendall(memoryview(frame)[sent:])

    def receive(self) -> RankMessage:
        """Wait for the next message. Raise EOFError if the other end is closed."""
        while not self._messages:
            try:
                data, files, _, _ = socket.recv_fds(self._socket, _MAX_BYTES, _MAX_FILES, socket.MSG_CMSG_CLOEXEC)
            except ConnectionError as error:
                raise EOFError("the socket of a rank is broken") from error
            self._files.extend(files)
            if not data:
                raise EOFError("the socket of a rank is closed")
            self._messages.extend(self._reader.feed(data))
        return self._messages.popleft()

    def take_memory(self, num_bytes: int) -> memoryview:
        """Return the memory that came with the oldest NewMaskMemory not yet taken."""
        return memoryview(mapped(self._files.popleft(), num_bytes))

    def close(self) -> None:
        self._socket.close()


class SharedMasks:
    """Rank 0's side of the memory for masks that all ranks read."""

    def __init__(self, channels: list[RankChannel]) -> None:
        self._channels = channels
        self._memories: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> memoryview:
        """Return memory that every rank maps, too; it is freed when the process ends."""
        file = shared_file("masks")
        os.ftruncate(file, num_bytes)
        for channel in self._channels:
            channel.send_encoded(encode(NewMaskMemory(num_bytes)), file)
        self._memories.append(mapped(file, num_bytes))
        return memoryview(self._memories[-1])

    def message(self, masks: memoryview) -> SampleMasked:
        """Return the message for masks at the start of one of the memories."""
        number = next(number for number, memory in enumerate(self._memories) if memory is masks.obj)
        return SampleMasked(number, masks.nbytes)


def mapped(file: int, num_bytes: int) -> mmap.mmap:
    """Map a file into memory and close it."""
    memory = mmap.mmap(file, num_bytes)
    os.close(file)
    return memory
