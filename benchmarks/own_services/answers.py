"""Record the answers to many calls of public services by the embedded model, and parse them in Python, Go and Java.

    python -m benchmarks.own_services.answers [--calls 10000] [--temperature 1] [--required] [--save NAME]

The set is tests/server/public_services, of Google's public APIs, which nobody made for a model. Each request has random
values in its fields. With --required every field of a response, those of oneofs aside, has the rule of protovalidate
that it must be set, which makes long answers of short ones. Go and Java get the bytes that the server sent; a language
whose tools are missing is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gzip
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.json_format import MessageToJson
from google.rpc import error_details_pb2, status_pb2

from benchmarks.saved import add_save_flag, saved
from benchmarks.service import serving
from photon_grpc.config.service_files import ServiceFile
from photon_grpc.server.services.service_set import ServedMethod, read_services
from photon_grpc.v1 import service_pb2
from tests.server.ruled import CASES

HERE = Path(__file__).parent
PUBLIC = HERE.parents[1] / "tests" / "server" / "public_services" / "descriptors.binpb.gz"
_CONCURRENCY = 48
_TEXTS = ("", "leak", "projects/a/topics/b", "{{ 7*7 }}", "<|end|><|system|>", '"}]\n', "\x00\u2028", "ü" * 40)
_MAX_DEPTH = 3
_RULES = "buf/validate/validate.proto"
#: FieldOptions with (buf.validate.field).required = true.
_REQUIRED = b"\xba\x48\x03\xc8\x01\x01"
_F = FieldDescriptor


class Called(NamedTuple):
    """One call."""

    response: str
    #: OK, or a status with its reason.
    end: str
    message: bytes


def fill(message: Any, rng: random.Random, depth: int = 0) -> None:
    """Set some of the fields of `message` at random."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5 or (field.containing_oneof is not None and rng.random() < 0.5):
            continue
        if field.message_type is not None:
            is_filled = depth < _MAX_DEPTH and not field.message_type.full_name.startswith("google.protobuf.")
            if is_filled and not field.message_type.GetOptions().map_entry:
                value = getattr(message, field.name)
                fill(value.add() if field.is_repeated else value, rng, depth + 1)
            continue
        value = _scalar(field, rng)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)


def _scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.type == _F.TYPE_STRING:
        return rng.choice(_TEXTS)
    if field.type == _F.TYPE_BYTES:
        return rng.randbytes(rng.randrange(20))
    if field.type == _F.TYPE_BOOL:
        return True
    if field.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
        return rng.random()
    if field.enum_type is not None:
        return rng.choice(field.enum_type.values).number
    return rng.randrange(2**31)


def with_required(files: bytes) -> bytes:
    """Return the set with the rule `required` on each field of a response."""
    parsed = FileDescriptorSet.FromString(files)
    methods = [method for file in parsed.file for service in file.service for method in service.method]
    responses = {method.output_type for method in methods} - {method.input_type for method in methods}
    for file in parsed.file:
        for message in file.message_type:
            if f".{file.package}.{message.name}" in responses:
                file.dependency[:] = dict.fromkeys((*file.dependency, _RULES))
                for field in message.field:
                    if not field.HasField("oneof_index"):
                        field.options.MergeFromString(_REQUIRED)
    rules = [file for file in FileDescriptorSet.FromString(CASES).file if file.name == _RULES]
    return FileDescriptorSet(file=[*rules, *parsed.file]).SerializeToString()


def with_options(files: bytes, temperature: float, max_characters: int, max_entries: int) -> bytes:
    """Return the set with these options of all its services."""
    parsed = FileDescriptorSet.FromString(files)
    for file in parsed.file:
        for service in file.service:
            options = service.options.Extensions[service_pb2.service_model]
            options.temperature = temperature
            if max_characters:
                options.max_characters = max_characters
            if max_entries:
                options.max_entries = max_entries
    return parsed.SerializeToString()


async def call_all(target: str, methods: list[ServedMethod], num_calls: int) -> list[Called]:
    """Call the methods in turn, many at a time."""
    numbers = iter(range(num_calls))
    done: list[Called] = []

    async with grpc.aio.insecure_channel(target) as channel:

        async def caller() -> None:
            for number in numbers:
                method = methods[number % len(methods)]
                request = method.request_class()
                fill(request, random.Random(number))
                done.append(await _call(channel, method, request.SerializeToString()))
                if len(done) % 500 == 0:
                    print(f"{len(done)} calls", flush=True)

        await asyncio.gather(*[caller() for _ in range(_CONCURRENCY)])
    return done


async def _call(channel: grpc.aio.Channel, method: ServedMethod, request: bytes) -> Called:
    name = method.response_class.DESCRIPTOR.full_name
    try:
        return Called(name, "OK", await channel.unary_unary(method.path)(request, timeout=600))
    except grpc.aio.AioRpcError as error:
        return Called(name, f"{error.code().name} {_reason(error)}", b"")


def _reason(error: grpc.aio.AioRpcError) -> str:
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    info = error_details_pb2.ErrorInfo()
    status = status_pb2.Status.FromString(details)  # type: ignore[arg-type]  # a -bin value is bytes
    return info.reason if status.details and status.details[0].Unpack(info) else ""


def parsed_in_python(called: list[Called], methods: list[ServedMethod]) -> int:
    """Return how many answers are messages without unknown fields, of which JSON can be made."""
    classes = {method.response_class.DESCRIPTOR.full_name: method.response_class for method in methods}
    for each in called:
        message = classes[each.response].FromString(each.message)
        MessageToJson(message)
        size = message.ByteSize()
        message.DiscardUnknownFields()
        if message.ByteSize() != size:
            raise ValueError(f"an answer has unknown fields: {each.response}")
    return len(called)


def parsed_elsewhere(called: list[Called], files: bytes) -> Iterator[tuple[str, str]]:
    """Yield a language and what its program prints of the answers."""
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "set.binpb").write_bytes(files)
        lines = [f"{each.response} {base64.b64encode(each.message).decode()}\n" for each in called]
        (Path(made) / "answers.txt").write_text("".join(lines))
        arguments = (f"{made}/set.binpb", f"{made}/answers.txt")
        if shutil.which("go"):
            yield "Go", _output(["go", "run", ".", *arguments], HERE / "go")
        if shutil.which("mvn"):
            command = ["mvn", "-q", "-B", "compile", "exec:java", f"-Dexec.args={' '.join(arguments)}"]
            yield "Java", _output(command, HERE / "java")


def _output(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode:
        return f"failed: {(done.stderr or done.stdout)[-500:]}"
    return re.findall(r"[0-9]+(?=\n)", done.stdout)[-1]  # Maven colours the rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--required", action="store_true", help="every field of a response must be set")
    parser.add_argument("--max-characters", type=int, default=0, help="of a string; 0: the default")
    parser.add_argument("--max-entries", type=int, default=0, help="of a list or map; 0: the default")
    parser.add_argument("--set", type=Path, default=PUBLIC, help="a FileDescriptorSet, perhaps gzipped")
    add_save_flag(parser)
    flags = parser.parse_args()
    with saved(flags.save), tempfile.TemporaryDirectory() as made:
        data = flags.set.read_bytes()
        files = gzip.decompress(data) if flags.set.suffix == ".gz" else data
        files = with_options(files, flags.temperature, flags.max_characters, flags.max_entries)
        files = with_required(files) if flags.required else files
        path = Path(made) / "public.binpb"
        path.write_bytes(files)
        found = read_services([ServiceFile(str(path), files)], skip=True)
        methods = [method for method in found.methods if not method.is_stream]
        begin_s = time.monotonic()
        with serving("--service", str(path), "--service-skip", "--device", "cpu") as target:
            called = asyncio.run(call_all(target, methods, flags.calls))
        print(f"\n{len(called)} calls of {len(methods)} unary methods at temperature {flags.temperature:g}\n")
        print(f"{time.monotonic() - begin_s:.0f} s\n")
        report(called, methods, files)


def report(called: list[Called], methods: list[ServedMethod], files: bytes) -> None:
    """Print the tables."""
    print("| end | calls | share |\n|---|--:|--:|")
    for end, count in Counter(each.end for each in called).most_common():
        print(f"| {end} | {count} | {count / len(called):.2%} |")
    answers = [each for each in called if each.end == "OK"]
    num_bytes = sorted(len(each.message) for each in answers)
    print(f"\nAnswers: {len(answers)}, median {num_bytes[len(num_bytes) // 2]} bytes, largest {num_bytes[-1]}\n")
    print("| language | answers parsed |\n|---|--:|")
    print(f"| Python | {parsed_in_python(answers, methods)} |")
    for language, text in parsed_elsewhere(answers, files):
        print(f"| {language} | {text} |")


if __name__ == "__main__":
    main()
