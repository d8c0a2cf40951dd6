"""Measure what constraints near their limits cost those beside them.

    python -m benchmarks.hostile_grammars [--only continuation limits] [--save NAME] [-- FLAGS OF serve]

`continuation`: gaps between the tokens of one plain stream, alone and while an output of thousands of ids is continued
under the dearest schema that is let through (an array of objects with 245 optional properties): each id is walked.
`limits`: outputs whose lexers are full, or nearly, two API keys in turn, all at once: which differ from what each is
alone, and memory of the engine. The model is the embedded one's shape with random weights and a longer context.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import llguidance

from benchmarks import service
from benchmarks.memory import resident_mib
from benchmarks.saved import add_save_flag, saved
from photon_grpc import demo
from photon_grpc.cli.load.load import Percentiles
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.engine.constraints.guidance import read_vocabulary
from photon_grpc.frontend.constraints.constraint import write_grammar
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc

PARTS = ("continuation", "limits")
_CONTEXT = 16_384
_NUM_PROPERTIES = 245
_KEYS = ("alice", "bob")
_NO_LIMIT = (("grpc.max_receive_message_length", -1),)

DEAREST = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {f"property{number}": {"type": "integer"} for number in range(_NUM_PROPERTIES)},
        "additionalProperties": False,
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What constraints near their limits cost those beside them.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ids", type=int, default=8_192, help="of the output that is continued")
    parser.add_argument("--grammars", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("flags", nargs="*", help="flags of serve, behind --")
    add_save_flag(parser)
    args = parser.parse_args(arguments)
    with saved(args.save), tempfile.TemporaryDirectory() as directory:
        model = _model(Path(directory))
        if "continuation" in args.only:
            _continuation(model, args)
        if "limits" in args.only:
            _limits(model, Path(directory), args)


def _model(directory: Path) -> Path:
    path = directory / "model"
    shutil.copytree(demo.TARGET, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": _CONTEXT}))
    return path


# --- a continuation --------------------------------------------------------------------------------------------------


def written(model: Path, schema: dict[str, Any], num_ids: int) -> list[int]:
    """Ids of an output that goes on: its array is never closed."""
    vocabulary = read_vocabulary(read_model_dir(model))
    assert vocabulary is not None
    constraint = write_grammar(ConstraintAsk("json_schema", json.dumps(schema)))
    limits = llguidance.LLParserLimits(**constraint.limits)
    matcher = llguidance.LLMatcher(vocabulary, constraint.grammar, log_level=0, limits=limits)
    # Objects of a few properties, over and over: one is written once, and walked again as often as it takes.
    text = [*vocabulary.tokenize_str('[{"property7":1,"property99":-12}')]
    again = [*vocabulary.tokenize_str(',{"property7":1,"property99":-12}')]
    ids = (text + again * (1 + num_ids // len(again)))[:num_ids]
    if not matcher.consume_tokens(ids):
        raise SystemExit(f"the ids do not obey the schema: {matcher.get_error()}")
    return ids


def _continuation(model: Path, args: argparse.Namespace) -> None:
    ids = written(model, DEAREST, args.ids)
    flags = ("--model", str(model), "--load-format", "dummy", *args.flags)
    print(f"\n## Gaps of one plain stream beside a continuation of {args.ids:,} ids\n")
    print("| beside it | gap p50 / p90 / p99 / worst ms | gaps | the continuation's first token, s |")
    print("|---|--:|--:|--:|")
    with service.serving(*flags) as address:
        asyncio.run(_beside(address, ids))


async def _beside(address: str, ids: list[int]) -> None:
    async with grpc.aio.insecure_channel(address, _NO_LIMIT) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        # The body of a prompt so long is computed once before: what is measured is the walk.
        await _continued(stub, ids, DEAREST, plain=True)
        for name in ("nobody", "the same ids, without a constraint", "the same ids, under the schema"):
            stop = asyncio.Event()
            gaps = asyncio.create_task(_gaps(stub, stop))
            await asyncio.sleep(2.0)
            begun_s = time.monotonic()
            if name == "nobody":
                await asyncio.sleep(4.0)
            else:
                await _continued(stub, ids, DEAREST, plain="without" in name)
            took_s = time.monotonic() - begun_s
            stop.set()
            found = await gaps
            mine = Percentiles.of(found)
            first = "–" if name == "nobody" else f"{took_s:.2f}"
            ms = " / ".join(f"{value * 1e3:.1f}" for value in (mine.p50, mine.p90, mine.p99, max(found)))
            print(f"| {name} | {ms} | {len(found)} | {first} |", flush=True)


async def _gaps(stub: Any, stop: asyncio.Event) -> list[float]:
    gaps: list[float] = []
    while not stop.is_set():
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(range(20, 40))
        request.stop.max_tokens, request.stop.ignore_eos = 2_000, True
        last_s = 0.0
        call = stub.StreamGenerate(request)
        async for _ in call:
            now_s = time.monotonic()
            if last_s:
                gaps.append(now_s - last_s)
            last_s = now_s
            if stop.is_set():
                call.cancel()
                break
    return gaps


async def _continued(stub: Any, ids: list[int], schema: dict[str, Any], *, plain: bool) -> None:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(range(20, 24))
    request.continue_from.ids.extend(ids)
    request.stop.max_tokens = len(ids) + 2
    if not plain:
        request.structured_output.json_schema = json.dumps(schema)
    try:
        await stub.Generate(request, timeout=300)
    except grpc.aio.AioRpcError as error:
        print(f"(the continuation: {error.code().name}: {error.details()})")


# --- limits ----------------------------------------------------------------------------------------------------------


def pattern(number: int) -> str:
    """Asks for one of some letters 15 characters before another: a lexer learns a state for nearly every text."""
    first, last = chr(ord("a") + number % 20), chr(ord("c") + number // 20)
    return f"(?s:.*)[{first}-z](?s:.){{14}}{last}(?s:.*)"


def _limits(model: Path, directory: Path, args: argparse.Namespace) -> None:
    digests = {key: hashlib.sha256(f"secret of {key}".encode()).hexdigest() for key in _KEYS}
    keys = directory / "keys.toml"
    entries = (
        f'[[key]]\nname = "{key}"\nsha256 = "{digest}"\nscopes = ["generate"]\n' for key, digest in digests.items()
    )
    keys.write_text("".join(entries))
    flags = ("--model", str(model), "--load-format", "dummy", "--api-keys-file", str(keys), "--max-num-seqs", "64")
    numbers = list(range(args.grammars))
    alone, _, _ = _answers(numbers, 1, flags, args)
    random.Random(3).shuffle(numbers)
    together, before_mib, most_mib = _answers(numbers, args.at_once, flags, args)
    differ = sum(alone[number] != together[number] for number in numbers)
    ends = sum(isinstance(answer, str) for answer in alone.values())
    print(f"\n## {args.grammars} outputs of 80 tokens near the limits, two API keys, {args.at_once} at a time\n")
    for number in numbers:
        if alone[number] != together[number]:
            print(f"\n{pattern(number // 2)}: alone {alone[number]}, together {together[number]}")
    print("| differ from alone | of these refused alone | engine before, at most MiB |\n|--:|--:|--:|")
    print(f"| {differ} | {ends} | {before_mib:.0f}, {most_mib:.0f} |", flush=True)


def _answers(
    numbers: list[int], num_at_once: int, flags: tuple[str, ...], args: argparse.Namespace
) -> tuple[dict[int, Any], float, float]:
    with service.serving(*flags, *args.flags) as address:
        return asyncio.run(_ask_all(address, numbers, num_at_once))


async def _ask_all(address: str, numbers: list[int], num_at_once: int) -> tuple[dict[int, Any], float, float]:
    engine = service.processes(address)["engine"]
    before_mib = most_mib = resident_mib(engine)
    answers: dict[int, Any] = {}
    left = iter(numbers)
    async with grpc.aio.insecure_channel(address, _NO_LIMIT) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def ask() -> None:
            nonlocal most_mib
            for number in left:
                answers[number] = await _ask(stub, number)
                most_mib = max(most_mib, resident_mib(engine))

        await asyncio.gather(*(ask() for _ in range(num_at_once)))
    return answers, before_mib, most_mib


async def _ask(stub: Any, number: int) -> Any:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend((20, 21 + number % 7))
    request.sampling.temperature, request.sampling.seed, request.stop.max_tokens = 1.0, number, 80
    request.output.token_ids = True
    # Every other request has the grammar of another's.
    request.structured_output.regex = pattern(number // 2)
    key = ("authorization", f"Bearer secret of {_KEYS[number // 4 % 2]}")
    try:
        answer = await stub.Generate(request, metadata=(key,), timeout=300)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return (list(answer.outputs[0].token_ids), answer.outputs[0].text)


if __name__ == "__main__":
    main()
