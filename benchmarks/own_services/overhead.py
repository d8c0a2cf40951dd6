"""Measure what a call of an own service takes beside Generate with the same prompt, constraint and tokens, end to end.

    python -m benchmarks.own_services.overhead [--pairs 400] [--set FILE] [--save NAME]

The two calls follow each other, in an order that changes with every pair, on one connection to a running service with
the embedded model at temperature 0. The client sends and receives bytes, so that its protobuf is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from benchmarks.saved import add_save_flag, saved
from benchmarks.service import processes, serving
from photon_grpc import demo
from photon_grpc.config.service_files import ServiceFile
from photon_grpc.core.ask import ChatInput
from photon_grpc.frontend.input.chat import ChatTemplate
from photon_grpc.server.services.prompt_form import PromptForm
from photon_grpc.server.services.service_set import ServedMethod, read_services
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import service_pb2

_TRIAGE = Path(__file__).parents[2] / "clients" / "triage"
_GENERATE = "/photon_grpc.v1.InferenceService/Generate"
#: Calls at a time where the processor is measured.
_AT_A_TIME = 8
_ROUNDS = 10
_BODY = "There is water under the machine, and it does not stop. "
_Call = Callable[[bytes], Awaitable[bytes]]


def triage_set() -> bytes:
    """Return the set of clients/triage, with short and repeatable answers."""
    from grpc_tools import protoc  # which a set that is given needs not

    with tempfile.TemporaryDirectory() as made:
        includes = [f"-I{_TRIAGE}", f"-I{files('grpc_tools') / '_proto'}"]
        out = f"--descriptor_set_out={made}/triage.binpb"
        if protoc.main(["protoc", *includes, "--include_imports", "--include_source_info", out, "triage.proto"]):
            raise RuntimeError("protoc failed")
        found = FileDescriptorSet.FromString((Path(made) / "triage.binpb").read_bytes())
    file = found.file[-1]
    file.dependency.append("google/protobuf/empty.proto")
    file.service[0].method.add(name="Acknowledge", input_type=".acme.v1.Ticket", output_type=".google.protobuf.Empty")
    options = file.service[0].options.Extensions[service_pb2.service_model]
    options.temperature, options.max_characters, options.max_entries = 0, 16, 2
    return found.SerializeToString()


def same_request(method: ServedMethod, request: Any, template: ChatTemplate) -> bytes:
    """Return the GenerateRequest with the prompt and the constraint of a call of `method`."""
    made = PromptForm(template).input(method, method.request_text.write(request))
    asked = pb.GenerateRequest(structured_output=pb.StructuredOutput(grammar=method.constraint.text))
    asked.sampling.temperature = 0
    if isinstance(made, ChatInput):
        for each in made.messages:
            asked.chat.messages.add(role=each.role, content=each.content)
    else:
        asked.text = made.text
    return asked.SerializeToString()


async def measure(target: str, methods: Sequence[ServedMethod], num_pairs: int, template: ChatTemplate) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        generate = channel.unary_unary(_GENERATE)
        print("| method | bytes of the request | output tokens | Generate, ms | own service, ms ", end="")
        print("| longer by, ms (95 %) ", end="")
        print("| front end's processor, ms | more by, ms |\n|---|--:|--:|--:|--:|--:|--:|--:|")
        for method in methods:
            own = channel.unary_unary(method.path)
            for repeats in (1, 16):
                request = method.request_class(subject="It leaks", body=_BODY * repeats)
                asked = same_request(method, request, template)
                sent = request.SerializeToString()
                num_tokens = await _equal_tokens(own, generate, sent, asked)
                # Longer answers say less of what is around them.
                count = num_pairs if num_tokens < 8 else num_pairs // 8
                ours, theirs = await _pairs(own, generate, sent, asked, count)
                theirs_ms, ours_ms = await _processor(target, ((generate, asked), (own, sent)), count)
                print(
                    f"| {method.name} | {len(sent)} | {num_tokens} | {_spread(theirs)} | {_spread(ours)} | "
                    f"{_longer(ours, theirs)} | {theirs_ms:.3f} | {ours_ms - theirs_ms:.3f} |",
                    flush=True,
                )


def _longer(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median of the pairs' differences in ms, with the interval that resampling gives."""
    differences = [1e3 * (one - other) for one, other in zip(ours, theirs, strict=True)]
    rng = random.Random(0)
    medians = sorted([statistics.median(rng.choices(differences, k=len(differences))) for _ in range(400)])
    return f"{statistics.median(differences):.3f} ({medians[10]:.3f} to {medians[-11]:.3f})"


async def _processor(target: str, calls: Sequence[tuple[_Call, bytes]], num_calls: int) -> list[float]:
    """Return the front end's processor time of each of the calls in ms: the median of rounds, in turns."""
    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for (call, message), durations in zip(calls, rounds, strict=True):
            begin_s = _frontend_s(target)
            await _many(call, message, num_calls // _ROUNDS)
            durations.append((_frontend_s(target) - begin_s) / (num_calls // _ROUNDS) * 1e3)
    return [statistics.median(durations) for durations in rounds]


async def _many(call: _Call, message: bytes, num_calls: int) -> None:
    numbers = iter(range(num_calls))

    async def caller() -> None:
        for _ in numbers:
            await call(message)

    await asyncio.gather(*[caller() for _ in range(_AT_A_TIME)])


def _frontend_s(target: str) -> float:
    """Return the seconds that the threads of the front end have run."""
    tasks = Path(f"/proc/{processes(target)['frontend 0']}/task").glob("*/schedstat")
    return sum([int(each.read_text().split()[0]) for each in tasks]) / 1e9


async def _equal_tokens(own: Any, generate: Any, sent: bytes, asked: bytes) -> int:
    """Return the tokens of an answer. Raise RuntimeError if the two calls do not do the same."""
    call = own(sent)
    await call
    usage = pb.GenerateResponse.FromString(dict(await call.trailing_metadata())["x-photon-usage-bin"]).usage
    response = pb.GenerateResponse.FromString(await generate(asked))
    theirs = response.usage
    if (usage.prompt_tokens, usage.output_tokens) != (theirs.prompt_tokens, theirs.output_tokens):
        raise RuntimeError(f"not the same work: {usage} and {theirs}")
    return usage.output_tokens


async def _pairs(
    own: _Call, generate: _Call, sent: bytes, asked: bytes, num_pairs: int
) -> tuple[list[float], list[float]]:
    """Return the durations of both calls, in turns."""
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(num_pairs + 20):
        both = [(own, sent, ours), (generate, asked, theirs)]
        for call, message, durations in both if number % 2 else both[::-1]:
            begin_s = time.perf_counter()
            await call(message)
            durations.append(time.perf_counter() - begin_s)
    return ours[20:], theirs[20:]


def _spread(durations: list[float]) -> str:
    low, middle, high = statistics.quantiles(durations, n=4)
    return f"{middle * 1e3:.3f} ({low * 1e3:.3f} to {high * 1e3:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument(
        "--set", type=Path, help="that of clients/triage as made here; unset: made anew, by grpcio-tools"
    )
    add_save_flag(parser)
    flags = parser.parse_args()
    data = flags.set.read_bytes() if flags.set else triage_set()
    read = read_services([ServiceFile("triage", data)], max_context_tokens=4096)
    methods = [method for method in read.methods if not method.is_stream]
    template = ChatTemplate((demo.TARGET / "chat_template.jinja").read_text())
    with saved(flags.save), tempfile.TemporaryDirectory() as made:
        path = Path(made) / "triage.binpb"
        path.write_bytes(data)
        print(f"Medians of {flags.pairs} pairs of calls, quartiles of durations, the middle of pairs' differences.\n")
        with serving("--service", str(path), "--device", "cpu") as target:
            asyncio.run(measure(target, methods[::-1], flags.pairs, template))


if __name__ == "__main__":
    main()
