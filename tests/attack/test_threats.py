"""What broke other servers, tried on this one: addresses in fields, sockets that nobody declared, errors that quote."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from photon_grpc.v1 import inference_pb2 as pb
from tests.attack.answers import Answer, answers, raw_call, strangers, tally
from tests.attack.figures import Figures
from tests.attack.test_mutated_messages import admin_methods
from tests.attack.victim import Victim, empty_request, path_of
from tests.attack.vitals import processes
from tests.service.running import wait_until

GENERATE = "/photon_grpc.v1.InferenceService/Generate"
_LISTENING = "0A"
_MOST_NESTED = 6


@contextlib.contextmanager
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """An address, and what was said to whoever listens there."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        heard.append(connection.recv(100))

        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x", heard
        # Else it waits for ever on some systems.
        server.shutdown(socket.SHUT_RDWR)


def with_text_everywhere(message: Message, text: str, depth: int = 0) -> Message:
    """In every field that holds text or bytes, and in one of every list and message."""
    for field in message.DESCRIPTOR.fields:
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None:
            if depth < _MOST_NESTED:
                with_text_everywhere(target.add() if field.is_repeated else target, text, depth + 1)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            value = text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
            target.append(value) if field.is_repeated else setattr(message, field.name, value)
    return message


def each_alone(message: Message, text: str) -> Iterator[Message]:
    """One request for every field of text at the top, as far as the message may be asked."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None and field.cpp_type == FieldDescriptor.CPPTYPE_STRING and not field.is_repeated:
            alone = type(message)()
            if field.type != FieldDescriptor.TYPE_BYTES:
                setattr(alone, field.name, text)
                yield alone


async def test_no_field_makes_the_server_open_an_address(attacked: Victim, figures: Figures) -> None:
    found: list[Answer] = []
    with listener() as (url, heard), attacked.unharmed():
        for address, methods in ((attacked.address, attacked.methods()), (attacked.admin, admin_methods())):
            async with grpc.aio.insecure_channel(address) as channel:
                for method in methods:
                    asked = [
                        with_text_everywhere(empty_request(method), url),
                        *each_alone(empty_request(method), url),
                        *each_alone(empty_request(method), f"file://{__file__}"),
                    ]
                    call = partial(raw_call, channel, path_of(method), to_stream=method.server_streaming)
                    found += await answers(partial(call, [message.SerializeToString()]) for message in asked)
    figures.add("addresses in fields", f"{len(found)} requests", tally(found))
    assert heard == []
    assert strangers(found, "NOT_FOUND") == []


def listening(pid: int) -> set[str]:
    """TCP ports and paths of sockets on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"socket:\[(\d+)]", os.readlink(link)))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING and words[9] in inodes:
                found.add(str(int(words[1].rpartition(":")[2], 16)))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "00010000" and words[6] in inodes:
            found.add(words[7])
    return found


def test_only_what_was_declared_listens(attacked: Victim) -> None:
    """And processes talk by sockets that have no name."""
    declared = {
        "supervisor": {str(urllib.parse.urlsplit(attacked.liveness).port)},
        "frontend": {attacked.address.rpartition(":")[2], attacked.admin.removeprefix("unix:")},
    }
    pids = processes(attacked)
    assert {role: listening(pid) for role, pid in pids.items()} == {role: declared.get(role, set()) for role in pids}


SECRET = "Zyzzyva-7431"
_INSIDES = re.compile(
    r"Traceback|\.py\b|site-packages|0x[0-9a-f]{6}|<class|object at|photon_grpc\.(?!v1)|/(?:proc|tmp|usr|home)/"
)


def refused() -> dict[str, pb.GenerateRequest]:
    """Reason -> a request that is refused with it, and has SECRET for a prompt."""

    def changed(**fields: Any) -> pb.GenerateRequest:
        request = pb.GenerateRequest(**fields)
        request.stop.max_tokens = 2
        if not request.HasField("chat"):
            request.text = SECRET
        return request

    user = pb.ChatMessage(role="nobody", content=SECRET)
    return {
        "INVALID_REQUEST": changed(sampling=pb.SamplingParams(temperature=-1)),
        "PROMPT_TOO_LONG": pb.GenerateRequest(text=" ".join([SECRET] * 400)),
        "INVALID_CONSTRAINT": changed(structured_output=pb.StructuredOutput(regex="(")),
        "INVALID_TEMPLATE": changed(chat=pb.ChatInput(messages=[user])),
        "MODEL_NOT_FOUND": changed(model="nothing"),
        "DEADLINE_PASSED": changed(scheduling=pb.SchedulingOptions(timeout=Duration(nanos=1))),
        "MALFORMED_MESSAGE": changed(),
    }


async def test_neither_errors_nor_the_log_tell_a_prompt_or_our_insides(attacked: Victim) -> None:
    asked = {reason: request.SerializeToString() for reason, request in refused().items()}
    asked["MALFORMED_MESSAGE"] += b"\xff"
    num_lines = len(attacked.service.lines)
    async with grpc.aio.insecure_channel(attacked.address) as channel:
        found = await answers(partial(raw_call, channel, GENERATE, [data], to_stream=False) for data in asked.values())
    assert [answer.outcome for answer in found] == list(asked)
    for answer in found:
        assert SECRET not in answer.text and SECRET not in answer.details
        assert not _INSIDES.search(answer.text), answer.text
    # Each is told there.
    wait_until(
        lambda: all(any(reason in line for line in attacked.service.lines[num_lines:]) for reason in asked), "told"
    )
    told = "\n".join(attacked.service.lines)
    assert SECRET not in told and "Traceback" not in told
