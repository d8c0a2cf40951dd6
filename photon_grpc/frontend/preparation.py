"""From a checked Ask to the Request that the engine gets: encode the prompt, try the constraint, replay earlier ids."""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from msgspec.structs import replace

from photon_grpc.core.ask import Ask, ChatInput, ConstraintAsk
from photon_grpc.core.constraint import Constraint
from photon_grpc.core.frames import Facts
from photon_grpc.core.request import NO_LIMITS, Request
from photon_grpc.frontend import checks
from photon_grpc.frontend.constraints.constraint import check_constraint
from photon_grpc.frontend.defaults import to_request
from photon_grpc.frontend.encoder import AnyInput, Encoder
from photon_grpc.frontend.engine_queue import EngineQueue
from photon_grpc.frontend.input.size import estimate_tokens, is_small
from photon_grpc.frontend.model import ServedModel
from photon_grpc.frontend.output.output import OutputText
from photon_grpc.frontend.outputs import outputs_of, replay_turns
from photon_grpc.frontend.quotas import QuotaLease
from photon_grpc.frontend.readiness import Readiness
from photon_grpc.frontend.tried_constraints import TriedConstraints

#: Writes the constraint of typed output, which may take long. Raises InvalidConstraint, QueueFull.
WriteConstraint = Callable[[], Awaitable[ConstraintAsk]]


class Prepared(NamedTuple):
    """A request before it is sent: its outputs have no new token, `facts` are those of the engine that it is for."""

    request: Request
    outputs: tuple[OutputText, ...]
    facts: Facts


class RequestPreparation:
    """Prepares requests. All long work is done by the encoder, or in turns.

    Args:
        seed: determines the seeds of requests that set none; 0 takes them from the system.
        queue: holds a place for each request in preparation.
        readiness: knows whether there is still an engine once a request is prepared.
    """

    def __init__(
        self, model: ServedModel, encoder: Encoder, seed: int, queue: EngineQueue, readiness: Readiness
    ) -> None:
        self._model = model
        self._encoder = encoder
        self._constraints = TriedConstraints(encoder)
        self._replays = replay_turns()
        self._seeds = random.Random(seed) if seed else random.SystemRandom()
        self._queue = queue
        self._readiness = readiness

    async def prepared(self, ask: Ask, facts: Facts, write: WriteConstraint | None, lease: QuotaLease) -> Prepared:
        """Prepare a checked `ask`. `write` is as in Frontend.stream. Raise PhotonError."""
        if ask.input is None:
            raise RuntimeError("an ask without input passed the checks")
        with self._place(ask.input, ask.origin.caller, facts, lease):
            prompt_ids, constraint = await self._encoded(ask, ask.input, facts, write)
        facts = self._readiness.facts()  # the engine may be lost by now
        checks.check_encoded(ask, prompt_ids, facts)
        request = to_request(
            ask,
            self._model,
            facts,
            prompt_ids,
            request_id=ask.origin.request_id or uuid.uuid4().hex,
            random_seed=self._seeds.getrandbits(64),
        )
        if constraint is not None or lease.limits is not NO_LIMITS:
            request = replace(request, constraint=constraint, limits=lease.limits)
        outputs = await outputs_of(ask, request, self._model, self._replays)
        if request.continued_ids:  # the engine may have been lost while they were replayed
            facts = self._readiness.facts()
        return Prepared(request, outputs, facts)

    def _place(self, input: AnyInput, caller: str, facts: Facts, lease: QuotaLease) -> AbstractContextManager[None]:
        """Return a place in the engine's queue. Large inputs need none, since the encoder bounds them.

        Raise QueueFull.
        """
        num_tokens = estimate_tokens(input, facts.max_model_len)
        if is_small(input):
            return self._queue.place(num_tokens, facts, lease.num_running, caller)
        self._queue.check(num_tokens, facts, lease.num_running)
        return nullcontext()

    async def _encoded(
        self, ask: Ask, input: AnyInput, facts: Facts, write: WriteConstraint | None
    ) -> tuple[tuple[int, ...], Constraint | None]:
        """Return the ids of the prompt, and the constraint once it was tried."""
        origin = ask.origin
        written = await self._written(write, facts) if write else ask.constraint
        prompt_ids = await self._encoder.encode(input, facts.max_model_len, origin.caller)
        if written is None and isinstance(input, ChatInput):
            written = self._model.tool_calls(input, prompt_ids)
        constraint = await self._constraints.tried(written, origin.owner, origin.caller) if written else None
        return prompt_ids, constraint

    async def _written(self, write: WriteConstraint, facts: Facts) -> ConstraintAsk:
        """Return the constraint that `write` gives, checked. Raise InvalidConstraint."""
        written = await write()
        check_constraint(written, self._model.facts(facts).limits.max_constraint_bytes)
        return written
