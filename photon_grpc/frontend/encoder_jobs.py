"""The jobs of an encoder process and their answers: plain data, so that the same code runs on both sides."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from photon_grpc.core.ask import ChatInput, ConstraintAsk, TextInput
from photon_grpc.core.constraint import Constraint
from photon_grpc.core.fault import Fault
from photon_grpc.errors import InternalFailure, InvalidConstraint, InvalidRequest, PhotonError, frames_of
from photon_grpc.frontend.constraints.constraint import field_of as constraint_field
from photon_grpc.frontend.encoder import decode, try_constraint
from photon_grpc.frontend.input.prompt import encode
from photon_grpc.frontend.model import ServedModel


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


def excess(job: Job, needs: str, limit: float | None = None) -> InvalidRequest:
    """Return the error of a job that exceeds a limit, in the unit of the message; `needs` is a verb phrase."""
    field = field_of(job)
    if isinstance(job, TryConstraint):
        return InvalidConstraint(f"{field}: compiling it {needs}", field=field, limit=limit)
    return InvalidRequest(f"encoding it {needs}", field=field, limit=limit)


def perform(job: Job, model: ServedModel) -> Answer:
    """Do a job. Raise MemoryError and nothing else that a job can cause."""
    try:
        if isinstance(job, DecodeIds):
            return Text(decode(model, unpacked(job.token_ids), job.skip_special_tokens))
        if isinstance(job, TryConstraint):
            return Grammar(try_constraint(job.constraint, model))
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
