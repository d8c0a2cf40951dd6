"""Requests in, streams out: what server and library call. Speaks text; one event loop, and an Encoder for what
takes long."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import lru_cache, partial

from msgspec.structs import replace

from photon_grpc.core.admission import check_ids
from photon_grpc.core.frames import Abort, Add, Facts, Reply, StepFrame, Up, Verb
from photon_grpc.core.generation import Start
from photon_grpc.core.ports import EngineLink
from photon_grpc.core.request import NO_LIMITS, Request
from photon_grpc.core.stats import Load
from photon_grpc.errors import (
    DeadlinePassed,
    Draining,
    EngineFailure,
    EngineRestarting,
    FeatureNotSupported,
    ModelLoading,
    ModelNotFound,
    PromptTooLong,
    Unavailable,
)
from photon_grpc.frontend import defaults
from photon_grpc.frontend.ask import Ask, ChatInput, ConstraintAsk, StreamAsk, TextInput
from photon_grpc.frontend.constraint import check_constraint
from photon_grpc.frontend.controls import Controls
from photon_grpc.frontend.encoder import Encoder, is_small
from photon_grpc.frontend.engine_queue import EngineQueue, estimate_tokens
from photon_grpc.frontend.live_streams import LiveStreams
from photon_grpc.frontend.model import ModelFacts, ServedModel
from photon_grpc.frontend.output import OutputText
from photon_grpc.frontend.outputs import outputs_of, replay_turns
from photon_grpc.frontend.prompt import Prepared
from photon_grpc.frontend.quotas import NO_SHARES, NoShares, Share, Shares
from photon_grpc.frontend.record import NO_OBSERVERS, Observers, Origin, RequestRecord, refused
from photon_grpc.frontend.scores import PromptScores
from photon_grpc.frontend.stream import TokenStream
from photon_grpc.frontend.tried_constraints import TriedConstraints
from photon_grpc.frontend.turns import Turns
from photon_grpc.frontend.update import Result, gathered

_LOG = logging.getLogger(__name__)

#: Of typed output, which may take long. Raises InvalidConstraint, QueueFull.
WriteConstraint = Callable[[], Awaitable[ConstraintAsk]]
_RETRY_AFTER_S = 1.0
#: Of the model's names in a refusal.
_MAX_NAMES_CHARS = 400
#: Ids that Tokenize gives though no context holds them.
_MAX_TOKENIZED = 2**20
#: Messages of a unary call: one, at the end.
_GATHER_ALL = StreamAsk(max_tokens_per_message=2**62, is_whole=True)


class State(Enum):
    LOADING = "loading"
    SERVING = "serving"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


class Frontend:
    """All methods belong to one event loop."""

    def __init__(
        self,
        *,
        link: EngineLink,
        model: ServedModel,
        encoder: Encoder,
        seed: int = 0,
        shares: Shares | NoShares = NO_SHARES,
        observers: Observers = NO_OBSERVERS,
    ) -> None:
        """`seed` draws the seeds of requests that set none; 0: from the system. `observers` get the record of every
        request."""
        self._link = link
        self._model = model
        #: Asked for by every request, made anew for every engine.
        self._model_facts = lru_cache(maxsize=1)(model.facts)
        self._encoder = encoder
        self._constraints = TriedConstraints(encoder)
        self._replays = replay_turns()
        self._seeds = random.Random(seed) if seed else random.SystemRandom()
        self._handles = itertools.count(1)
        self._streams = LiveStreams(self._send)
        self._queue = EngineQueue()
        self._turns = Turns()
        self._shares = shares
        self._controls = Controls(link)
        self._observers = observers
        self._state = State.LOADING if link.facts is None else State.SERVING
        self._failure = ""
        self._callbacks: list[Callable[[State], None]] = []
        self._is_empty = asyncio.Event()
        link.listen(self._on_frame, self._on_lost)

    @property
    def state(self) -> State:
        return self._state

    def on_state(self, callback: Callable[[State], None]) -> None:
        """`callback` is called with every new state."""
        self._callbacks.append(callback)

    @property
    def facts(self) -> Facts:
        """The engine's Facts. Raise Unavailable while there is none."""
        return self._link.facts or self._facts()

    @property
    def load(self) -> Load:
        """The newest that the engine has told."""
        return self._queue.load

    @property
    def num_streams(self) -> int:
        """Streams whose reader has not come to the end."""
        return len(self._streams)

    def model(self, name: str) -> ModelFacts:
        """ "" is the default model. Raise ModelNotFound."""
        if name and name not in self._model.names:
            names = ", ".join(self._model.names)[:_MAX_NAMES_CHARS]
            raise ModelNotFound(f"there is no model {name[:200]!r}; this server has {names}", field="model")
        return self._model_facts(self._link.facts)

    def models(self) -> tuple[ModelFacts, ...]:
        """The default model first."""
        return (self._model_facts(self._link.facts),)

    async def stream(self, ask: Ask, write: WriteConstraint | None = None) -> TokenStream:
        """Checks, encodes and sends `ask`; returns before any token. The caller closes the stream. `write` gives the
        constraint of an ask where it is UNWRITTEN: called once the request has its place. Raises PhotonError."""
        try:
            return await self._stream(ask, write)
        except BaseException as error:
            self.refused(self._origin(ask), error)
            raise

    def refused(self, origin: Origin, error: BaseException) -> None:
        """A request has failed before there was a stream of it."""
        self._observers.ended(refused(origin, error))

    async def _stream(self, ask: Ask, write: WriteConstraint | None) -> TokenStream:
        model = self.model(ask.model)
        facts = self._facts()
        defaults.check(ask, self._model, facts, model.limits)
        _check_deadline(ask)
        with self._shares.share(ask.owner, defaults.deadline_s(ask)) as share:
            request, outputs = await self._encoded(ask, facts, share, write)
            return self._open(ask, model.name, request, outputs, share)

    async def generate(self, ask: Ask, write: WriteConstraint | None = None) -> Result:
        """The whole of one generation. Cancelling it aborts the request. Raise PhotonError."""
        async with await self.stream(_gathering(ask), write) as stream:
            updates = [update async for update in stream]
        return gathered(stream.start, updates)

    async def tokenize(self, model: str, input: TextInput | ChatInput, caller: str = "") -> tuple[int, ...]:
        """The ids that `generate` would see, also more than the context holds. Raise PhotonError."""
        limit = max(self.model(model).max_context_tokens, _MAX_TOKENIZED)
        defaults.check_text_input(input, self._model)
        try:
            return await self._encoder.encode(input, limit, caller)
        except PromptTooLong as error:
            at_least = error.needed or limit + 1
            message = f"it gives at least {at_least} tokens; Tokenize returns at most {limit}"
            raise PromptTooLong(message, field=error.field, needed=at_least, limit=limit) from None

    async def detokenize(
        self, model: str, token_ids: Sequence[int], skip_special_tokens: bool, caller: str = ""
    ) -> str:
        """The text that ids release. Raise PhotonError."""
        facts = self.model(model)
        check_ids(token_ids, facts.vocab_size, "token_ids.ids")
        if self._model.tokenizer is None:
            raise FeatureNotSupported("token_ids: this model has no tokenizer (feature TEXT)", field="token_ids")
        return await self._encoder.decode(token_ids, skip_special_tokens, caller)

    async def control(self, verb: Verb, names: tuple[str, ...] = ()) -> Reply:
        """Have the engine obey an operator. Raise Unavailable."""
        return await self._controls.send(verb, names)

    async def drain(self, timeout_s: float) -> int:
        """New asks are refused; running ones get `timeout_s`, then fail with Draining. Return how many did."""
        self._change(State.DRAINING)
        if self._streams:
            self._is_empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        left = tuple(self._streams)
        for stream in left:
            self._streams.abort(stream)
            stream.fail(
                Draining(
                    "the server is going away; the time for running requests is over", retry_after_s=_RETRY_AFTER_S
                )
            )
        return len(left)

    def give_up(self, why: str) -> None:
        """There will be no engine any more: what runs and what is asked fails with EngineFailure(why)."""
        self._failure = why
        self._queue.lost()
        for stream in self._streams.forget():
            stream.fail(EngineFailure(why))
        self._change(State.FAILED)

    # From Ask to Add.

    def _facts(self) -> Facts:
        """The engine's facts. Raise Unavailable where nothing can be served now."""
        facts = self._link.facts
        if self._state is State.DRAINING:
            raise Draining("the server is going away", retry_after_s=_RETRY_AFTER_S)
        if self._state is State.FAILED:
            raise EngineFailure(self._failure)
        if self._state is State.LOADING:
            raise ModelLoading("the model is being loaded", retry_after_s=_RETRY_AFTER_S)
        if facts is None or self._state is State.RESTARTING:
            raise EngineRestarting("the engine is restarting", retry_after_s=_RETRY_AFTER_S)
        return facts

    def _origin(self, ask: Ask) -> Origin:
        model = self._model.names[0] if ask.model in ("", *self._model.names) else ""
        return Origin(
            ask.arrival_s,
            ask.request_id,
            ask.owner,
            ask.method,
            model,
            defaults.deadline_s(ask),
            ask.traceparent,
            ask.caller,
        )

    def _place(self, ask: Ask, facts: Facts, share: Share) -> AbstractContextManager[None]:
        """A place in the engine's queue while the prompt is prepared; inputs that wait in the Encoder are bounded
        there. Raise QueueFull."""
        num_tokens = estimate_tokens(ask, facts)
        if ask.input is None or is_small(ask.input):
            return self._queue.place(num_tokens, facts, share.num_running, ask.caller)
        self._queue.check(num_tokens, facts, share.num_running)
        return contextlib.nullcontext()

    async def _written(self, ask: Ask, write: WriteConstraint) -> ConstraintAsk:
        """Raise InvalidConstraint."""
        written = await write()
        check_constraint(written, self.model(ask.model).limits.max_constraint_bytes)
        return written

    async def _prepare(self, ask: Ask, facts: Facts) -> Prepared:
        if ask.input is None:
            raise RuntimeError("an ask without input was let through")
        return await self._encoder.prepare(ask.input, ask.stop.stop_strings, facts.max_model_len, ask.caller)

    async def _encoded(
        self, ask: Ask, facts: Facts, share: Share, write: WriteConstraint | None
    ) -> tuple[Request, tuple[OutputText, ...]]:
        """The engine's request and its outputs, with the ids replayed that it continues from. Raise PhotonError."""
        with self._place(ask, facts, share):
            written = await self._written(ask, write) if write else ask.constraint
            prepared = await self._prepare(ask, facts)
            wanted = written or self._model.tool_calls(ask.input, prepared.prompt_ids)
            constraint = await self._constraints.tried(wanted, ask.owner, ask.caller) if wanted else None
        facts = self._facts()  # the engine may have gone meanwhile
        _check_deadline(ask)
        request_id = ask.request_id or uuid.uuid4().hex
        request = defaults.to_request(
            ask, self._model, facts, prepared.prompt_ids, request_id=request_id, drawn_seed=self._seeds.getrandbits(64)
        )
        if constraint is not None or share.limits is not NO_LIMITS:
            request = replace(request, constraint=constraint, limits=share.limits)
        outputs = await outputs_of(ask, request, self._model, prepared.stops, self._replays)
        return request, outputs

    def _open(
        self, ask: Ask, model_name: str, request: Request, outputs: tuple[OutputText, ...], share: Share
    ) -> TokenStream:
        self._queue.check(request.num_given, self._facts(), share.num_running)
        share.check_prompt(request.num_given)
        stream = TokenStream(
            _start(ask, model_name, request),
            outputs,
            num_prompt=request.num_given,
            prompt_scores=PromptScores(request.prompt_ids, request.scores.prompt_records, self._model.token_bytes),
            origin=replace(self._origin(ask), request_id=request.request_id),
            options=ask.stream,
            turns=self._turns,
            on_close=partial(self._closed, share),
        )
        if outputs[0].finish is not None:
            # By a stop string in the ids that it continues from.
            stream.ended()
            return stream
        first, *_ = [next(self._handles) for _ in outputs]
        self._link.send(Add(first, request))
        self._queue.sent(first, request.num_given)
        share.sent(request.num_given)
        self._streams.add(stream, first)
        return stream

    # From the engine.

    def _on_frame(self, frame: Up) -> None:
        if isinstance(frame, StepFrame):
            self._streams.take(frame)
            self._queue.told(frame.load, frame.newest_added)
        elif isinstance(frame, Load):
            self._queue.told(frame)
        elif isinstance(frame, Reply):
            self._controls.replied(frame)
        elif isinstance(frame, Facts) and self._state in (State.LOADING, State.RESTARTING):
            self._change(State.SERVING)

    def _on_lost(self) -> None:
        """The engine is gone and has forgotten everything."""
        for stream in self._streams.forget():
            stream.fail_lost()
        self._controls.lost()
        if self._state in (State.SERVING, State.LOADING):
            self._change(State.RESTARTING)
        # Those who are told of the change may still ask for its last Load.
        self._queue.lost()

    def _closed(self, share: Share, stream: TokenStream, record: RequestRecord) -> None:
        self._streams.remove(stream)
        share.end(record.usage.output_tokens)
        self._observers.ended(record)
        if not self._streams:
            self._is_empty.set()

    def _send(self, abort: Abort) -> None:
        # An engine that is gone runs nothing.
        with contextlib.suppress(Unavailable):
            self._link.send(abort)

    def _change(self, state: State) -> None:
        if self._state is state:
            return
        self._state = state
        for callback in tuple(self._callbacks):
            callback(state)


def _check_deadline(ask: Ask) -> None:
    deadline_s = defaults.deadline_s(ask)
    if deadline_s is not None and deadline_s <= time.monotonic():
        raise DeadlinePassed("the deadline has passed")


def _start(ask: Ask, model_name: str, request: Request) -> Start:
    return Start(
        request_id=request.request_id,
        model=model_name,
        create_time_s=time.time(),
        seed=request.sampling.seed,
        prompt_token_ids=request.prompt_ids if ask.output.prompt_token_ids else (),
    )


def _gathering(ask: Ask) -> Ask:
    return replace(ask, stream=_GATHER_ALL)
