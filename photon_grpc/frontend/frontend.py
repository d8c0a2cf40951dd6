"""The front end that the server and the library call: requests in, streams out.

It runs on one event loop and leaves work that takes long to an Encoder.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from msgspec.structs import replace

from photon_grpc import __version__
from photon_grpc.core.admission import check_ids
from photon_grpc.core.ask import Ask, ChatInput, Origin, StreamAsk, TextInput
from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.frames import Abort, Add, Facts, Reply, StepFrame, Up, Verb
from photon_grpc.core.generation import Start
from photon_grpc.core.logprobs import NO_LOGPROBS
from photon_grpc.core.ports import EngineLink
from photon_grpc.core.request import Request
from photon_grpc.core.stats import Load
from photon_grpc.errors import (
    Draining,
    EngineFailure,
    FeatureNotSupported,
    ModelNotFound,
    PromptTooLong,
    Unavailable,
)
from photon_grpc.frontend import checks
from photon_grpc.frontend.controls import Controls
from photon_grpc.frontend.encoder import Encoder
from photon_grpc.frontend.engine_queue import EngineQueue
from photon_grpc.frontend.live_streams import LiveStreams
from photon_grpc.frontend.model import ModelFacts, ServedModel
from photon_grpc.frontend.output.logprobs import NO_PROMPT_LOGPROBS, PromptLogprobs
from photon_grpc.frontend.output.update import Result, gathered
from photon_grpc.frontend.preparation import Prepared, RequestPreparation, WriteConstraint
from photon_grpc.frontend.quotas import NO_FRONTEND_QUOTAS, FrontendQuotas, NoFrontendQuotas, QuotaLease
from photon_grpc.frontend.readiness import Readiness, State
from photon_grpc.frontend.record import NO_OBSERVERS, Observers, RequestRecord, refused
from photon_grpc.frontend.stream import Prompt, TokenStream
from photon_grpc.frontend.watchers import Watcher, Watchers
from photon_grpc.frontend.write_turns import WriteTurns

_LOG = logging.getLogger(__name__)

#: Characters of the model's names in an error message.
_MAX_NAMES_CHARS = 400
#: Ids that Tokenize returns even if the context holds fewer.
_MAX_TOKENIZED = 2**20
#: Options of a unary call: one message at the end.
_GATHER_ALL = StreamAsk(max_tokens_per_message=2**62, is_whole=True)


class Frontend:
    """The prompts, streams and readiness of one model. All methods belong to one event loop."""

    def __init__(
        self,
        *,
        link: EngineLink,
        model: ServedModel,
        encoder: Encoder,
        seed: int = 0,
        quotas: FrontendQuotas | NoFrontendQuotas = NO_FRONTEND_QUOTAS,
        observers: Observers = NO_OBSERVERS,
    ) -> None:
        """Join the parts to the engine's link.

        `seed` determines the seeds of requests that set none; 0 takes them from the system. `observers` get the record
        of every request.
        """
        self._link = link
        self._model = model
        # Every request needs them, and only a new engine changes them.
        self._model_facts = lru_cache(maxsize=1)(model.facts)
        self._encoder = encoder
        self._handles = itertools.count(1)
        self._streams = LiveStreams(self._send)
        self._queue = EngineQueue()
        self._turns = WriteTurns()
        self._quotas = quotas
        self._controls = Controls(link)
        self._watchers = Watchers(link)
        self._observers = observers
        self._readiness = Readiness(link)
        self._preparation = RequestPreparation(model, encoder, seed, self._queue, self._readiness)
        self.on_state = self._readiness.on_state
        self._is_empty = asyncio.Event()
        link.listen(self._on_frame, self._on_lost)

    @property
    def state(self) -> State:
        return self._readiness.state

    @property
    def facts(self) -> Facts:
        """The engine's Facts. Raise Unavailable while there is no engine."""
        return self._link.facts or self._readiness.facts()

    @property
    def numerics_version(self) -> str:
        """The version of the numerics that the engine computes with; "" while there is no engine."""
        return self._link.facts.numerics.version if self._link.facts else ""

    @property
    def load(self) -> Load:
        """The newest Load that the engine has sent."""
        return self._queue.load

    @property
    def num_streams(self) -> int:
        """The number of streams whose reader has not come to the end."""
        return len(self._streams)

    def model(self, name: str) -> ModelFacts:
        """Return the facts of a model; an empty name is the default model. Raise ModelNotFound."""
        if name and name not in self._model.names:
            names = ", ".join(self._model.names)[:_MAX_NAMES_CHARS]
            raise ModelNotFound(f"there is no model {name[:200]!r}; this server has {names}", field="model")
        return self._model_facts(self._link.facts)

    def models(self) -> tuple[ModelFacts, ...]:
        """Return the facts of all models, the default model first."""
        return (self._model_facts(self._link.facts),)

    async def stream(
        self, ask: Ask, write: WriteConstraint | None = None, *, options: StreamAsk | None = None
    ) -> TokenStream:
        """Check, encode and send `ask`; return before any token. The caller closes the stream.

        `write` returns the constraint of an ask whose own is UNWRITTEN, and is called once the request has its place in
        the queue. `options` replace those of its stream, which are checked nevertheless. Raise PhotonError.
        """
        try:
            return await self._stream(ask, write, options)
        except BaseException as error:
            self.refused(ask.origin, error)
            raise

    def refused(self, origin: Origin, error: BaseException) -> None:
        """Record a request that failed before it had a stream."""
        self._observers.ended(refused(origin, error))

    async def _stream(self, ask: Ask, write: WriteConstraint | None, options: StreamAsk | None) -> TokenStream:
        origin, model = ask.origin, self.model(ask.model)
        origin.model = model.name
        facts = self._readiness.facts()
        checks.check(ask, self._model, facts, model.limits)
        if options is not None:
            ask = replace(ask, stream=options)
        with self._quotas.lease(origin.owner, origin.deadline_s) as lease:
            return self._open(ask, await self._preparation.prepared(ask, facts, write, lease), lease)

    async def generate(self, ask: Ask, write: WriteConstraint | None = None) -> Result:
        """Return the whole of one generation. Cancelling it aborts the request. Raise PhotonError."""
        async with await self.stream(ask, write, options=_GATHER_ALL) as stream:
            updates = [update async for update in stream]
        return gathered(stream.start, updates)

    async def tokenize(self, model: str, input: TextInput | ChatInput, caller: str = "") -> tuple[int, ...]:
        """Return the ids that `generate` would see, even if the context holds fewer. Raise PhotonError."""
        limit = max(self.model(model).max_context_tokens, _MAX_TOKENIZED)
        checks.check_text_input(input, self._model)
        try:
            return await self._encoder.encode(input, limit, caller)
        except PromptTooLong as error:
            at_least = error.needed or limit + 1
            message = f"the input has at least {at_least} tokens; Tokenize returns at most {limit}"
            raise PromptTooLong(message, field=error.field, needed=at_least, limit=limit) from None

    async def detokenize(
        self, model: str, token_ids: Sequence[int], skip_special_tokens: bool, caller: str = ""
    ) -> str:
        """Return the text of `token_ids`. Raise PhotonError."""
        facts = self.model(model)
        check_ids(token_ids, facts.vocab_size, "token_ids.ids")
        if self._model.tokenizer is None:
            raise FeatureNotSupported("token_ids: this model has no tokenizer (feature TEXT)", field="token_ids")
        return await self._encoder.decode(token_ids, skip_special_tokens, caller)

    def token_bytes(self, model: str) -> Callable[[int], bytes]:
        """Return the bytes of a token by its id. Raise ModelNotFound, FeatureNotSupported."""
        self.model(model)
        if self._model.tokenizer is None:
            raise FeatureNotSupported("return_token_strs: this model has no tokenizer", field="return_token_strs")
        return self._model.token_bytes

    async def control(self, verb: Verb, names: tuple[str, ...] = ()) -> Reply:
        """Send an operator's command to the engine and return its reply. Raise Unavailable."""
        return await self._controls.send(verb, names)

    def watch(self) -> Watcher:
        """Return the pictures of the engine from now on; the caller closes them. Raise QueueFull, EngineFailure."""
        return self._watchers.add()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new asks; let running ones finish for `timeout_s`, then fail them. Return the number that failed."""
        self._readiness.change(State.DRAINING)
        if self._streams:
            self._is_empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        unfinished = tuple(self._streams)
        for stream in unfinished:
            self._streams.abort(stream)
            stream.fail(Draining(f"{Draining.text}; the time limit for running requests has passed"))
        return len(unfinished)

    def give_up(self, why: str) -> None:
        """Fail all running and future requests with EngineFailure(why): there will be no other engine."""
        self._queue.lost()
        for stream in self._streams.forget():
            stream.fail(EngineFailure(why))
        self._watchers.give_up(why)
        self._readiness.fail(why)

    def _open(self, ask: Ask, prepared: Prepared, lease: QuotaLease) -> TokenStream:
        """Send the request if there is still room. Raise QueueFull, QuotaExceeded, Unavailable."""
        request, outputs, facts = prepared
        num_prompt = len(request.prompt_ids) + len(request.continued_ids)
        start = _start(ask, request, facts.numerics.version)
        prompt = Prompt(num_prompt, _prompt_logprobs(request, self._model))
        self._queue.check(num_prompt, facts, lease.num_running)
        lease.check_prompt(num_prompt)
        stream = TokenStream(
            start,
            outputs,
            prompt=prompt,
            ask=ask,
            turns=self._turns,
            on_close=partial(self._closed, lease),
        )
        if outputs[0].finish is not None:
            # A stop string in the ids that it continues from ended it.
            stream.ended()
            return stream
        first, *_ = [next(self._handles) for _ in outputs]
        self._link.send(Add(first, request))
        self._queue.sent(first, num_prompt)
        lease.sent(num_prompt)
        self._streams.add(stream, first)
        return stream

    # From the engine.

    def _on_frame(self, frame: Up) -> None:
        if isinstance(frame, StepFrame):
            self._streams.take(frame)
            self._queue.update(frame.load, frame.newest_added)
        elif isinstance(frame, Load):
            self._queue.update(frame)
        elif isinstance(frame, Reply):
            self._controls.replied(frame)
        elif isinstance(frame, EnginePicture):
            self._watchers.received(frame)
        elif isinstance(frame, Facts):
            self._watchers.linked()
            self._readiness.linked()

    def _on_lost(self) -> None:
        """Fail all streams: the engine is gone."""
        for stream in self._streams.forget():
            stream.fail_lost(is_last=self.state is State.DRAINING)
        self._controls.lost()
        self._watchers.lost()
        self._readiness.lost()
        # The callbacks of Readiness may read its last Load, so the queue forgets it after them.
        self._queue.lost()

    def _closed(self, lease: QuotaLease, stream: TokenStream, record: RequestRecord) -> None:
        self._streams.remove(stream)
        lease.end(record.usage.output_tokens)
        self._observers.ended(record)
        if not self._streams:
            self._is_empty.set()

    def _send(self, abort: Abort) -> None:
        # A lost engine has nothing to abort.
        with contextlib.suppress(Unavailable):
            self._link.send(abort)


def _start(ask: Ask, request: Request, numerics_version: str) -> Start:
    return Start(
        request_id=request.request_id,
        model=ask.origin.model,
        create_time_s=ask.origin.create_time_s,
        seed=request.sampling.seed,
        prompt_token_ids=request.prompt_ids if ask.output.prompt_token_ids else (),
        release=__version__,
        numerics_version=numerics_version,
    )


def _prompt_logprobs(request: Request, model: ServedModel) -> PromptLogprobs:
    if request.logprobs is NO_LOGPROBS:
        return NO_PROMPT_LOGPROBS
    return PromptLogprobs(request.prompt_ids, request.logprobs.num_prompt_records, model.token_bytes)
