"""An EngineLink without an engine: it keeps what was sent, and the test writes the replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from photon_grpc.core.ask import Ask, IdsInput, Origin, SamplingAsk, TextInput
from photon_grpc.core.frames import Abort, Add, Down, Facts, Failed, Finished, Started, StepFrame, Up
from photon_grpc.core.request import FinishReason
from photon_grpc.core.stats import Load
from photon_grpc.errors import EngineRestarting
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.input.chat import ChatTemplate
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.model import ServedModel
from photon_grpc.frontend.output.answer import PLAIN, AnswerFormat
from photon_grpc.frontend.quotas import NO_FRONTEND_QUOTAS, FrontendQuotas, NoFrontendQuotas
from tests.frontend.small_tokenizers import definition
from tests.kv_plans import kv_plan

VOCAB_SIZE = 512
FACTS = Facts(
    max_model_len=128,
    vocab_size=VOCAB_SIZE,
    kv=kv_plan(16),
    num_blocks=6,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_queue_size=4,
    max_queued_tokens=100,
    device="cpu",
    dtype="float32",
)


#: Of every model.
FEATURES = (
    *("LOGPROBS", "PROMPT_LOGPROBS", "NUM_OUTPUTS", "PENALTIES", "LOGIT_BIAS"),
    *("CONTINUE_FROM", "PREFIX_CACHE", "PRIORITY"),
)
#: Sampling that changes nothing.
NEUTRAL = SamplingAsk(
    temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
)


class FakeLink:
    def __init__(self, facts: Facts | None = FACTS) -> None:
        self.facts = facts
        self.sent: list[Down] = []
        self.on_frame: Callable[[Up], None] = lambda frame: None
        self.on_lost: Callable[[], None] = lambda: None
        self.came = asyncio.Event()

    def send(self, frame: Down) -> None:
        if self.facts is None:
            raise EngineRestarting("the engine is restarting")
        self.sent.append(frame)
        self.came.set()

    def listen(self, on_frame: Callable[[Up], None], on_lost: Callable[[], None]) -> None:
        self.on_frame, self.on_lost = on_frame, on_lost

    async def added(self, count: int) -> None:
        """Wait until `count` requests were sent."""
        while len(self.adds) < count:
            self.came.clear()
            await asyncio.wait_for(self.came.wait(), 120)

    @property
    def adds(self) -> list[Add]:
        return [frame for frame in self.sent if isinstance(frame, Add)]

    @property
    def aborted(self) -> list[int]:
        return [handle for frame in self.sent if isinstance(frame, Abort) for handle in frame.handles]

    def step(
        self,
        *tokens: tuple[int, int],
        finished: tuple[Finished, ...] = (),
        failed: tuple[Failed, ...] = (),
        started: tuple[Started, ...] = (),
        preempted: tuple[int, ...] = (),
        load: Load | None = None,
        scores: dict[int, bytes] | None = None,
        prompt_scores: dict[int, bytes] | None = None,
    ) -> None:
        """Deliver a frame whose Load counts everything that was sent; `tokens` are (handle, id)."""
        handles, ids = zip(*tokens, strict=True) if tokens else ((), ())
        newest = self.adds[-1].handle if self.adds else 0
        news = (handles, ids, finished, failed, load or Load(), started, preempted, newest)
        self.on_frame(StepFrame(1, *news, scores or {}, prompt_scores or {}))

    def lose(self) -> None:
        self.facts = None
        self.on_lost()


def done(
    handle: int, reason: FinishReason = FinishReason.MAX_TOKENS, num_generated: int = 0, num_cached: int = 0
) -> Finished:
    return Finished(handle, reason, num_generated, num_cached, 0.25)


def served(kind: str | None = "byte_level", *, template: str | None = None, **changes: object) -> ServedModel:
    tokenizer = Tokenizer(definition(kind)) if kind else None
    fields = {
        "names": ("small", "alias"),
        "max_context_tokens": 256,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (
            tokenizer.encode("<|eot_id|>", parse_special_tokens=True, add_special_tokens=False)
            if kind == "byte_level"
            else (2,)
        ),
        "tokenizer": tokenizer,
        "template": ChatTemplate(template) if template else None,
        "answers": AnswerFormat.of(template, tokenizer.markers.texts) if tokenizer and template else PLAIN,
    } | changes
    return ServedModel(**fields)  # type: ignore[arg-type]


@contextmanager
def frontend(
    model: ServedModel | None = None,
    *,
    link: FakeLink | None = None,
    seed: int = 0,
    quotas: FrontendQuotas | NoFrontendQuotas = NO_FRONTEND_QUOTAS,
) -> Iterator[tuple[Frontend, FakeLink]]:
    link = link or FakeLink()
    with ThreadPoolExecutor(1) as pool:
        model = model or served()
        encoder = ThreadEncoder(model, pool)
        yield Frontend(link=link, model=model, encoder=encoder, seed=seed, quotas=quotas), link


def ask(text: str | tuple[int, ...] = "Hello", **changes: object) -> Ask:
    input = TextInput(text) if isinstance(text, str) else IdsInput(text)
    fields = {name: changes.pop(name) for name in Origin.__struct_fields__ if name != "model" and name in changes}
    origin = Origin(**({"arrival_s": time.monotonic()} | fields))  # type: ignore[arg-type]
    return Ask(**({"input": input, "origin": origin} | changes))  # type: ignore[arg-type]
