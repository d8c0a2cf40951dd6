"""Encoders, which do the long work of inputs off the event loop. `compose` chooses one for the Frontend.

Jobs and answers of an encoder process are plain data, so that the same code runs on both sides.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

import msgspec

from photon_grpc.core.ask import ChatInput, ConstraintAsk, IdsInput, TextInput
from photon_grpc.core.constraint import Constraint
from photon_grpc.core.fault import Fault
from photon_grpc.errors import InternalFailure, InvalidConstraint, InvalidRequest, PhotonError, frames_of
from photon_grpc.frontend.constraints.constraint import field_of as constraint_field
from photon_grpc.frontend.constraints.least_bytes import least_bytes
from photon_grpc.frontend.constraints.trial import try_out
from photon_grpc.frontend.fair_turns import FairTurns
from photon_grpc.frontend.input.chat_json import json_fields, texts_of
from photon_grpc.frontend.input.prompt import encode
from photon_grpc.frontend.model import ServedModel

#: Limits of an input for the front end's threads; it takes at most about 40 ms of one core.
_SMALL_BYTES = 32 * 1024
_SMALL_JSON_CHARS = 8 * 1024
_SMALL_NUM_MESSAGES = 128
_SMALL_NUM_IDS = 8 * 1024
#: Limits of the jobs that run in the pool of threads, and of those that wait for it.
_MAX_AT_ONCE = 4
_MAX_JOBS = 4096
_MAX_JOBS_BYTES = 2**27
_BYTES_PER_ID = 4
#: What a QueueFull says there is too much of.
WAITING = "inputs wait to be encoded"
#: More than any context, since a caller may write any number.
_MAX_LEAST_TOKENS = 2**30

AnyInput = TextInput | IdsInput | ChatInput


class Encoder(Protocol):
    """An encoder whose callers take turns. A cancelled call releases what it held."""

    async def encode(self, input: AnyInput, max_tokens: int, caller: str = "") -> tuple[int, ...]:
        """Return the ids of a checked input. Raise PromptTooLong, InvalidRequest, InvalidTemplate, Overloaded."""

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, caller: str = "") -> str:
        """Return the text of ids. Raise Overloaded."""

    async def try_out(self, constraint: ConstraintAsk, caller: str = "") -> Constraint:
        """Return the grammar of a checked constraint. Raise InvalidConstraint, Overloaded."""


class ThreadEncoder:
    """An encoder in a pool of threads.

    A job that has begun runs to its end even if its caller is gone; its size bounds its time.

    Args:
        max_at_once: jobs submitted at a time, more than the pool has threads, so that no thread waits for the loop.
    """

    def __init__(self, model: ServedModel, pool: Executor, max_at_once: int = _MAX_AT_ONCE) -> None:
        self._model = model
        self._pool = pool
        self._turns = FairTurns(max_at_once, WAITING, max_jobs=_MAX_JOBS, max_bytes=_MAX_JOBS_BYTES)

    async def encode(self, input: AnyInput, max_tokens: int, caller: str = "") -> tuple[int, ...]:
        if isinstance(input, IdsInput):
            return input.token_ids
        model = self._model
        place = await self._turns.enter(caller, _num_chars(input))
        work = (input, model.tokenizer, model.template, max_tokens)
        return await self._turns.perform(place, self._pool, encode, *work)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, caller: str = "") -> str:
        place = await self._turns.enter(caller, _BYTES_PER_ID * len(token_ids))
        return await self._turns.perform(place, self._pool, _decode, self._model, token_ids, skip_special_tokens)

    async def try_out(self, constraint: ConstraintAsk, caller: str = "") -> Constraint:
        """Try a constraint without the limits of an encoder process: a crash of the compiler ends this process."""
        place = await self._turns.enter(caller, len(constraint.text))
        return await self._turns.perform(place, self._pool, _try_out, constraint, self._model)


def _num_chars(input: TextInput | ChatInput) -> int:
    """Return the characters of an input, which are about its bytes."""
    if isinstance(input, TextInput):
        return len(input.text)
    num_chars = sum([len(message.content) for message in input.messages])
    return num_chars + sum([len(text) for _, text in json_fields(input)]) if input.has_tools else num_chars


def is_small(input: AnyInput) -> bool:
    """Return whether an input may be encoded in a thread, where it cannot be cancelled and often holds the GIL."""
    if isinstance(input, IdsInput):
        return True
    if isinstance(input, TextInput):
        return _is_short((input.text,))
    if len(input.messages) > _SMALL_NUM_MESSAGES:
        return False
    json = [text for _, text in json_fields(input)]
    return sum(map(len, json)) <= _SMALL_JSON_CHARS and _is_short([*texts_of(input), *json])


def are_few(token_ids: Sequence[int]) -> bool:
    """Return whether ids are few enough to be decoded in a thread."""
    return len(token_ids) <= _SMALL_NUM_IDS


def _is_short(texts: Sequence[str]) -> bool:
    if sum(map(len, texts)) > _SMALL_BYTES:
        return False
    return len("".join(texts).encode(errors="surrogatepass")) <= _SMALL_BYTES


# --- what crosses to a process ---------------------------------------------------------------------------------------


class EncodeText(msgspec.Struct, frozen=True, array_like=True, tag=50):
    input: TextInput
    max_tokens: int


class EncodeChat(msgspec.Struct, frozen=True, array_like=True, tag=51):
    input: ChatInput
    max_tokens: int


class DecodeIds(msgspec.Struct, frozen=True, array_like=True, tag=52):
    #: int32 in native byte order.
    token_ids: bytes
    skip_special_tokens: bool


class TryConstraint(msgspec.Struct, frozen=True, array_like=True, tag=53):
    constraint: ConstraintAsk


class Ids(msgspec.Struct, frozen=True, array_like=True, tag=60):
    #: int32 in native byte order.
    token_ids: bytes


class Text(msgspec.Struct, frozen=True, array_like=True, tag=61):
    text: str


class Grammar(msgspec.Struct, frozen=True, array_like=True, tag=63):
    constraint: Constraint


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=62):
    fault: Fault
    #: The traceback of an unforeseen failure without its text, for the log.
    frames: str = ""


Job = EncodeText | EncodeChat | DecodeIds | TryConstraint
Answer = Ids | Text | Grammar | Refusal
JOB: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def unpacked(token_ids: bytes) -> tuple[int, ...]:
    ids = array("i")
    ids.frombytes(token_ids)
    return tuple(ids)


def field_of(job: Job) -> str:
    """Return the field of the request that an error about `job` names."""
    if isinstance(job, TryConstraint):
        return constraint_field(job.constraint)
    if isinstance(job, DecodeIds):
        return "token_ids.ids"
    return "text" if isinstance(job, EncodeText) else "chat"


def excess(job: Job, needs: str, limit: int | None = None) -> InvalidRequest:
    """Return the error of a job that exceeds a limit; `needs` is a verb phrase."""
    field = field_of(job)
    if isinstance(job, TryConstraint):
        return InvalidConstraint(f"{field}: compiling it {needs}", field=field, limit=limit)
    return InvalidRequest(f"encoding it {needs}", field=field, limit=limit)


def perform(job: Job, model: ServedModel) -> Answer:
    """Do a job. Raise MemoryError and nothing else that a job can cause."""
    try:
        if isinstance(job, DecodeIds):
            return Text(_decode(model, unpacked(job.token_ids), job.skip_special_tokens))
        if isinstance(job, TryConstraint):
            return Grammar(_try_out(job.constraint, model))
        return Ids(packed(encode(job.input, model.tokenizer, model.template, job.max_tokens)))
    except PhotonError as error:
        return refusal(error)
    except MemoryError:
        raise
    except Exception as error:
        # Keep the frames of an unforeseen exception but not its text, which may quote a prompt.
        frames = f"{type(error).__name__}\n{frames_of(error)}"
        return Refusal(Fault.of(InternalFailure("internal error while encoding the input")), frames)


def refusal(error: PhotonError) -> Refusal:
    # A template's error message may hold a lone surrogate, which msgpack cannot encode.
    message = error.message.encode(errors="replace").decode()
    return Refusal(msgspec.structs.replace(Fault.of(error), message=message))


def _try_out(ask: ConstraintAsk, model: ServedModel) -> Constraint:
    constraint = try_out(ask)
    if model.tokenizer is None:
        return constraint
    least_tokens = -(-least_bytes(ask) // max(model.tokenizer.max_token_bytes, 1))
    return msgspec.structs.replace(constraint, least_tokens=min(least_tokens, _MAX_LEAST_TOKENS))


def _decode(model: ServedModel, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    if model.tokenizer is None:
        raise RuntimeError("ids passed the checks although there is no tokenizer")
    return model.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
