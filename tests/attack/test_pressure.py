"""Requests with all options drawn at random, over few slots and fewer blocks, half of them cut off: whatever arrives
equals its solo run."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.attack.answers import together
from tests.attack.figures import Figures
from tests.attack.size import Size
from tests.attack.victim import CONTEXT, Victim

Stub = inference_pb2_grpc.InferenceServiceStub
_IN_FLIGHT = 48
_MOST_TOKENS = 40
_LIMIT_S = 100.0
_STOP_STRINGS = ("\n", "def", "return", "self", "(", " the")
#: Some may end after any token, some leave no choice for long, one has no longest text.
_CONSTRAINTS = (
    {"json_schema": '{"type": "array", "items": {"type": "object", "properties": {"number": {"type": "integer"}}}}'},
    {"json_schema": '{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}'},
    {"regex": "(?s:.*)[a-m](?s:.){3}q(?s:.*)"},
    {"regex": "[a-z]{1,9}(é|ü|🙂)+ends here and nowhere else"},
    {"grammar": 'start: item+\nitem: "- " /[a-z ]+/ "\\n" | "(" start ")"'},
    {"json_object": pb.StructuredOutput.JsonObject()},
)


@dataclass
class Heard:
    """What one call delivered: per output its ids and text, and how each ended."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, pb.Finish] = field(default_factory=dict)
    usage: pb.Usage = field(default_factory=pb.Usage)
    preemptions: int = 0
    code: str = "OK"

    def take(self, message: pb.StreamGenerateResponse) -> None:
        for delta in message.deltas:
            self.ids.setdefault(delta.index, []).extend(delta.token_ids)
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            if delta.HasField("finish"):
                self.finishes[delta.index] = delta.finish
        if message.HasField("usage"):
            self.usage = message.usage
            self.preemptions = message.timing.preemption_count

    def differs(self, alone: Heard) -> str:
        """From its solo run, of which one that was cut off is the beginning; empty: in nothing."""
        if self.code == "OK" and self.ids.keys() != alone.ids.keys():
            return f"outputs {sorted(self.ids)} and not {sorted(alone.ids)}"
        for index, ids in self.ids.items():
            whole = index in self.finishes
            for mine, its in ((ids, alone.ids[index]), (self.texts[index], alone.texts[index])):
                if mine != (its if whole else its[: len(mine)]):
                    return f"output {index}: {mine!r} and not {its!r}"
            if whole and self.finishes[index] != alone.finishes[index]:
                return f"output {index} ended {self.finishes[index]} and not {alone.finishes[index]}"
        return "" if self.code != "OK" else self._miscounted(alone)

    def _miscounted(self, alone: Heard) -> str:
        counted = sum(map(len, self.ids.values()))
        if self.usage.output_tokens != counted or self.usage.prompt_tokens != alone.usage.prompt_tokens:
            return f"usage says {self.usage} of {counted} ids; alone it says {alone.usage}"
        return "" if self.usage.cached_prompt_tokens <= self.usage.prompt_tokens else f"usage says {self.usage}"


def drawn(draw: random.Random, beginnings: Sequence[list[int]]) -> pb.GenerateRequest:
    """Every option that changes an output or when it comes, set or not."""
    asked = pb.GenerateRequest()
    num_outputs = draw.choice((1, 1, 1, 2, 4))
    ids = [*draw.choice(beginnings), *(draw.randrange(4, 4096) for _ in range(draw.randrange(1, 60)))]
    asked.token_ids.ids.extend(ids)
    _draw_sampling(asked.sampling, draw, num_outputs)
    if draw.random() < 0.3:
        asked.structured_output.CopyFrom(pb.StructuredOutput(**draw.choice(_CONSTRAINTS)))
    _draw_stop(asked.stop, draw, is_constrained=asked.HasField("structured_output"))
    asked.output.token_ids = True
    if draw.random() < 0.3:
        asked.output.skip_special_tokens = draw.random() < 0.5
    if draw.random() < 0.2:
        asked.output.logprobs = draw.choice((0, 3, 20))
    if draw.random() < 0.1:
        asked.output.prompt_logprobs = draw.choice((0, 5))
    asked.output.prompt_token_ids = draw.random() < 0.2
    asked.cache.salt = draw.choice(("", "", "a", "b"))
    asked.cache.bypass_prefix_cache = draw.random() < 0.2
    asked.cache.session_id = draw.choice(("", "s"))
    asked.scheduling.priority = draw.randrange(-5, 6)
    asked.stream.continuous_usage = draw.random() < 0.3
    if draw.random() < 0.3:
        asked.stream.max_tokens_per_message = draw.choice((1, 3, 1000))
    if draw.random() < 0.2:
        asked.stream.min_interval.FromMilliseconds(draw.choice((1, 30, 500)))
    return asked


def _draw_sampling(sampling: pb.SamplingParams, draw: random.Random, num_outputs: int) -> None:
    sampling.num_outputs = num_outputs
    sampling.seed = draw.getrandbits(64)
    sampling.temperature = draw.choice((0.0, 0.0, 0.4, 1.0, 1.5))
    if draw.random() < 0.4:
        sampling.top_p = draw.choice((0.3, 0.9, 1.0))
    if draw.random() < 0.4:
        sampling.top_k = draw.choice((1, 5, 200))
    if draw.random() < 0.3:
        sampling.min_p = draw.choice((0.0, 0.05, 0.5))
    if draw.random() < 0.2:
        sampling.repetition_penalty = draw.choice((0.5, 1.1, 3.0))
    if draw.random() < 0.2:
        sampling.frequency_penalty = draw.choice((-2.0, 0.5, 2.0))
    if draw.random() < 0.2:
        sampling.logit_bias.update(
            {draw.randrange(4096): draw.choice((-100, -3, 5)) for _ in range(draw.choice((1, 300)))}
        )


def _draw_stop(stop: pb.StopParams, draw: random.Random, *, is_constrained: bool) -> None:
    stop.max_tokens = draw.randrange(1, _MOST_TOKENS)
    stop.ignore_eos = draw.random() < 0.5
    # Not with a constraint, which may leave only ids that end an output, or only others than these.
    if not is_constrained and draw.random() < 0.7:
        stop.min_tokens = draw.randrange(stop.max_tokens + 1)
    if draw.random() < 0.3:
        stop.stop_strings.extend(draw.sample(_STOP_STRINGS, draw.randrange(1, 3)))
        stop.include_stop_in_text = draw.random() < 0.5
    if draw.random() < 0.4:
        # Of the likeliest, so that they are met, and often very many.
        stop.stop_token_ids.extend(draw.sample(range(4, 600), 1 if is_constrained else draw.choice((1, 5, 300))))


async def listen(
    stub: Stub, asked: pb.GenerateRequest, *, patience: int | None = None, limit_s: float = _LIMIT_S
) -> Heard:
    """What the call delivers until it ends, or until so many messages have come."""
    heard = Heard()
    call = stub.StreamGenerate(asked, timeout=limit_s)
    try:
        async for message in call:
            heard.take(message)
            patience = None if patience is None else patience - 1
            if patience == 0:
                call.cancel()
                heard.code = "CANCELLED"
                break
    except grpc.aio.AioRpcError as error:
        heard.code = error.code().name
    return heard


async def under_pressure(address: str, requests: Sequence[pb.GenerateRequest], draw: random.Random) -> list[Heard]:
    """All at once: half whole, a quarter cancelled, a quarter with a deadline."""
    room = asyncio.Semaphore(_IN_FLIGHT)

    async def one(stub: Stub, asked: pb.GenerateRequest, fate: float, share: float) -> Heard:
        async with room:
            if fate < 0.25:
                return await listen(stub, asked, patience=1 + int(share * 20))
            if fate < 0.5:
                return await listen(stub, asked, limit_s=share * 2)
            return await listen(stub, asked)

    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel)
        return await together(one(stub, asked, draw.random(), draw.random()) for asked in requests)


async def alone(address: str, asked: Sequence[pb.GenerateRequest]) -> list[Heard]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel)
        return [await listen(stub, _solo(request)) for request in asked]


def _solo(asked: pb.GenerateRequest) -> pb.GenerateRequest:
    """The same, computed from nothing and told at once."""
    solo = pb.GenerateRequest()
    solo.CopyFrom(asked)
    solo.ClearField("stream")
    solo.cache.bypass_prefix_cache = True
    return solo


async def test_what_arrives_is_what_arrives_alone(attacked: Victim, size: Size, figures: Figures) -> None:
    draw = random.Random(12)
    beginnings = [[], *([draw.randrange(4, 4096) for _ in range(count)] for count in (16, 40, 100))]
    requests = [drawn(draw, beginnings) for _ in range(size.requests)]
    assert all(len(asked.token_ids.ids) + _MOST_TOKENS < CONTEXT for asked in requests)
    with attacked.unharmed():
        heard = await under_pressure(attacked.address, requests, draw)
        # Backwards: whatever a tenant left in its slot is not there for the same one twice.
        delivered = [(asked, told) for asked, told in zip(requests, heard, strict=True) if told.ids][::-1]
        solo = await alone(attacked.address, [asked for asked, _ in delivered])
        attacked.owns_nothing()
    wrong = [told.differs(expected) for (_, told), expected in zip(delivered, solo, strict=True)]
    told = Counter(told.code for told in heard) + Counter({"other than alone": sum(map(bool, wrong))})
    preemptions = sum(told.preemptions for told in heard)
    cached = sum(told.usage.cached_prompt_tokens for told in heard)
    sent = f"{size.requests} requests, {preemptions} preemptions, {cached:,} tokens from the cache"
    figures.add("correctness under pressure", sent, told)
    assert [told.code for told in solo if told.code != "OK"] == []
    # Else there was no pressure.
    assert preemptions and cached and {"OK", "CANCELLED", "DEADLINE_EXCEEDED"} <= told.keys()
    assert [what for what in wrong if what] == []
