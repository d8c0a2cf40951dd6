"""Encoders, which do the long work of inputs off the event loop. `compose` chooses one for the Frontend."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

import msgspec

from photon_grpc.core.ask import ChatInput, ConstraintAsk, IdsInput, TextInput
from photon_grpc.core.constraint import Constraint
from photon_grpc.frontend.constraints.least_bytes import least_bytes
from photon_grpc.frontend.constraints.trial import try_out
from photon_grpc.frontend.fair_turns import FairTurns
from photon_grpc.frontend.input.prompt import encode
from photon_grpc.frontend.input.size import num_chars
from photon_grpc.frontend.model import ServedModel

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
        place = await self._turns.enter(caller, num_chars(input))
        work = (input, model.tokenizer, model.template, max_tokens)
        return await self._turns.perform(place, self._pool, encode, *work)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, caller: str = "") -> str:
        place = await self._turns.enter(caller, _BYTES_PER_ID * len(token_ids))
        return await self._turns.perform(place, self._pool, decode, self._model, token_ids, skip_special_tokens)

    async def try_out(self, constraint: ConstraintAsk, caller: str = "") -> Constraint:
        """Try a constraint without the limits of an encoder process: a crash of the compiler ends this process."""
        place = await self._turns.enter(caller, len(constraint.text))
        return await self._turns.perform(place, self._pool, try_constraint, constraint, self._model)


def try_constraint(ask: ConstraintAsk, model: ServedModel) -> Constraint:
    """Return the grammar of a checked constraint. Raise InvalidConstraint."""
    constraint = try_out(ask)
    if model.tokenizer is None:
        return constraint
    least_tokens = -(-least_bytes(ask) // max(model.tokenizer.max_token_bytes, 1))
    return msgspec.structs.replace(constraint, least_tokens=min(least_tokens, _MAX_LEAST_TOKENS))


def decode(model: ServedModel, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text of checked ids."""
    if model.tokenizer is None:
        raise RuntimeError("ids passed the checks although there is no tokenizer")
    return model.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
