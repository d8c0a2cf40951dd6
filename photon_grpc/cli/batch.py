"""`batch`: a file of requests, sent to a running server, and a file of answers, which a second run resumes.

A line of the input is a JSON object with `prompt` (a text or a list of ids) or `messages`, optionally an `id`, and
options of generate by name; or a JSON string, the prompt. A line of the output has the number of the input line, a
digest of that line and of the flags, and `outputs` with `usage`, or the `error` of the request; lines are in the order
in which they were answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from photon_grpc.cli.terminal.connection import connection
from photon_grpc.cli.terminal.option_values import no_option, read_bias, set_option
from photon_grpc.cli.terminal.terminal import remark, to_base64
from photon_grpc.client import Client, Generation, Options, Prompt, Unreachable
from photon_grpc.client.many import persist, unordered
from photon_grpc.client.message_type import write_message_type
from photon_grpc.client.retry_policy import PATIENCE_S
from photon_grpc.compose.console import bar_of
from photon_grpc.core.fields import fields_of
from photon_grpc.errors import ConfigError, InvalidRequest, NotAllowed, RequestError
from photon_grpc.v1 import inference_pb2

_DIGEST_CHARS = 16
#: Options that do not affect the answer: a run may resume with others.
_NOT_OF_ANSWERS = {"labels"} | {field.name for field in (*fields_of("cache"), *fields_of("scheduling"))}
#: The beginning of a line of the output, by which an unfinished one is recognized.
_BEGIN = b'{"line": '
_INSTEAD = "name another file, or overwrite it with --overwrite"

#: A coroutine that answers one prompt with options of generate.
Ask = Callable[..., Coroutine[Any, Any, Generation]]


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request of the input."""

    number: int
    digest: str
    data: bytes


def batch(
    target: str, source: Path, target_file: Path, options: Options, concurrency: int, *, overwrite: bool = False
) -> int:
    """Answer every line of `source` that `target_file` has no answer to, or with `overwrite` every line.

    Return the exit code: 0, or 1 if requests failed. Raise ConfigError for files that do not belong together, and
    PhotonError if the server is lost or denies access; answers so far are kept.
    """
    lines = list(_read(source, _flags_as_bytes(options)))
    out = _opened(target_file, source)
    try:
        with _named(target_file):
            if overwrite:
                out.truncate(0)
            answered, num_failed = _answered(out, target_file, {line.number: line.digest for line in lines})
        remaining = [line for line in lines if line.number not in answered]
        if answered:
            remark(f"{target_file} already has {len(answered)} of {len(lines)} answers")
        num_failed += asyncio.run(_run(target, remaining, options, concurrency, out))
    finally:
        with _named(target_file):
            out.close()
    remark(f"{len(lines)} answered, {num_failed} of them with an error" if num_failed else f"{len(lines)} answered")
    return 1 if num_failed else 0


@contextlib.contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Name the output in an OSError of reading or writing it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _opened(path: Path, source: Path) -> BinaryIO:
    """Open the output. Raise ConfigError, also if input and output are the same file."""
    try:
        if path.exists() and os.path.samefile(path, source):
            raise ConfigError(f"{path} is the input {source}; name another file for the answers")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file; batch reads its answers again to continue")
        return path.open("a+b")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _flags_as_bytes(options: Options) -> bytes:
    """Return the flags that affect answers as bytes, the same for any order of flags."""
    flags = {name: value for name, value in options.items() if name not in _NOT_OF_ANSWERS}
    return json.dumps(flags, sort_keys=True, default=_type_as_hex).encode()


def _type_as_hex(message_type: Any) -> str:
    written = inference_pb2.StructuredOutput.Protobuf()
    write_message_type(written, message_type)
    return written.SerializeToString(deterministic=True).hex()


def _read(source: Path, flags: bytes) -> Iterator[InputLine]:
    """Yield the lines, each with a digest of it and the flags. Raise ConfigError.

    Only a line feed ends a line: JSON may contain the other line ends.
    """
    try:
        for number, data in enumerate(source.read_bytes().split(b"\n"), 1):
            if data.strip():
                yield InputLine(number, hashlib.sha256(data + b"\n" + flags).hexdigest()[:_DIGEST_CHARS], data)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from None


def _answered(out: BinaryIO, path: Path, digests: dict[int, str]) -> tuple[set[int], int]:
    """Return the numbers of the lines in the output, and how many of them failed.

    Remove an unfinished last line. Raise ConfigError if the output answers other requests.
    """
    out.seek(0)
    data = out.read()
    whole = data[: data.rfind(b"\n") + 1]
    rest = data[len(whole) :]
    if not rest.startswith(_BEGIN[: len(rest)]):
        raise ConfigError(f"{path} is not an output of batch; {_INSTEAD}")
    numbers, num_failed = set(), 0
    for answer in whole.split(b"\n")[:-1]:
        try:
            record = json.loads(answer)
            number, is_same = record["line"], digests.get(record["line"]) == record["digest"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is not an output of batch; {_INSTEAD}") from None
        if not is_same:
            problem = f"{path} answers another request at line {number} of the input, or was made with other flags"
            raise ConfigError(f"{problem}; {_INSTEAD}")
        numbers.add(number)
        num_failed += "error" in record
    out.truncate(len(whole))
    return numbers, num_failed


async def _run(target: str, lines: list[InputLine], options: Options, concurrency: int, out: BinaryIO) -> int:
    """Answer every line; return the number that failed."""
    num_failed = 0
    async with Client(target, **connection()) as client:
        ask = _with_notice(client)

        async def answer(line: InputLine) -> dict[str, Any]:
            return await _answer(ask, line, options)

        with bar_of("requests", len(lines), sys.stderr.isatty()) as advance:
            async for _, record in unordered(answer, lines, concurrency):
                with _named(out.name):
                    out.write(_line_of(record))
                    out.flush()
                num_failed += "error" in record
                advance()
    with _named(out.name):
        os.fsync(out.fileno())
    return num_failed


def _with_notice(client: Client) -> Ask:
    """Return the client's `generate`, which writes a line the first time that no server answers."""
    is_noticed = False

    async def ask(prompt: Prompt, **options: Any) -> Generation:
        nonlocal is_noticed
        try:
            return await client.generate(prompt, **options)
        except Unreachable as error:
            if not is_noticed:
                is_noticed = True
                remark(f"{error}; retrying for {PATIENCE_S:g} s")
            raise

    return ask


async def _answer(ask: Ask, line: InputLine, options: Options) -> dict[str, Any]:
    """Return the line of the output. Raise PhotonError for a failure that other requests would meet, too."""
    record: dict[str, Any] = {"line": line.number, "digest": line.digest}
    try:
        request = _request_of(line.data)
        record |= {"id": request.pop("id")} if "id" in request else {}
        prompt = request.pop("messages" if "messages" in request else "prompt")
        try:
            generation = await persist(lambda: ask(prompt, **_merged(options, request)))
        except (TypeError, ValueError) as error:  # for a value that no request can hold
            raise InvalidRequest(str(error)) from None
    except NotAllowed:
        raise
    except RequestError as error:
        failure = {"reason": error.reason, "message": str(error), "field": error.field}
        return record | {"error": {name: value for name, value in failure.items() if value}}
    return record | _as_json(generation)


def _merged(options: Options, request: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the options of flags and line; the line overrides, and its constraint replaces that of the flags."""
    merged: dict[str, Any] = {**options}
    for name, value in request.items():
        set_option(merged, name, value)
    return merged


def _request_of(data: bytes) -> dict[str, Any]:
    """Parse a line of the input. Raise InvalidRequest."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the line is not JSON: {error}") from None
    request: dict[str, Any] = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(request, dict) or ("prompt" in request) == ("messages" in request):
        raise InvalidRequest("a line must be a JSON string, or a JSON object with either prompt or messages")
    known = {*Options.__annotations__, "id", "prompt", "messages"} - {"message_type"}
    if unknown := sorted(request.keys() - known):
        raise InvalidRequest(no_option(unknown[0], known), field=unknown[0])
    _check_prompt(request)
    if isinstance(request.get("logit_bias"), dict):
        request["logit_bias"] = read_bias(request["logit_bias"])
    return request


def _check_prompt(request: dict[str, Any]) -> None:
    messages, prompt = request.get("messages"), request.get("prompt")
    if "messages" in request and not (isinstance(messages, list) and all(isinstance(each, dict) for each in messages)):
        raise InvalidRequest("messages must be a list of objects with role and content", field="messages")
    is_ids = isinstance(prompt, list) and all(type(each) is int for each in prompt)
    if "prompt" in request and not (isinstance(prompt, str) or is_ids):
        raise InvalidRequest("prompt must be a text or a list of ids", field="prompt")


def _line_of(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # an id may hold half of a surrogate pair
        return json.dumps(record).encode() + b"\n"


def _as_json(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    return {
        "outputs": [_output(output) for output in generation.outputs],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
            "output_tokens": usage.output_tokens,
        },
        "seed": generation.seed,
    }


def _output(output: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {"text": output.text, "finish": output.finish.reason}
    more: dict[str, Callable[[], Any]] = {
        "token_ids": lambda: list(output.token_ids),
        "reasoning": lambda: output.reasoning,
        "content": lambda: output.content if output.reasoning else "",
        "tool_calls": lambda: [
            {"name": call.name, "arguments_json": call.arguments_json, "id": call.id} for call in output.tool_calls
        ],
        "scores": lambda: [
            {"token_id": score.token_id, "logprob": score.logprob, "rank": score.rank} for score in output.scores
        ],
        "message": lambda: to_base64(output.message) if output.message is not None else "",
    }
    return parts | {name: value for name, make in more.items() if (value := make())}
