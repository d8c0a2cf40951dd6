"""Random requests with every option drawn, each as options of `LLM` and of the client, and as a Request."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.logprobs import LogprobParams
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.frontend.constraints.constraint import write_grammar

#: Share of the requests with nothing but a temperature: a step of these alone draws its ids in the head's kernel.
_PLAIN = 0.3
_REGEXES = ("[a-z ]{20,400}", "([A-Z][a-z]{1,9} ){3,40}\\.", "\\[([0-9]{1,3}, ){4,60}0\\]")


class Drawn(NamedTuple):
    """A request; its options have the names of `LLM.generate`."""

    prompt: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def is_plain(self) -> bool:
        return self.options.keys() <= {"max_tokens", "temperature", "seed", "ignore_eos"}

    @property
    def num_outputs(self) -> int:
        return int(self.options.get("num_outputs", 1))

    @property
    def traits(self) -> list[str]:
        """Names of what was drawn, for the table."""
        options = self.options
        scored = options.get("logprobs")
        names = ["greedy" if options["temperature"] == 0.0 else "temperature", "plain" if self.is_plain else "options"]
        names.append("no logprobs" if scored is None else "logprobs 0" if scored == 0 else "logprobs 1-20")
        named = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
        named += ("prompt_logprobs", "score_token_ids", "num_outputs", "stop_token_ids", "min_tokens", "regex")
        names += [name for name in (*named, "allowed_token_ids") if name in options]
        return [*names, f"prompt {_range(len(self.prompt))}"]


class Limits(NamedTuple):
    """What a request may ask of the model."""

    vocab_size: int
    max_model_len: int
    has_grammars: bool
    min_output: int = 16
    max_output: int = 64
    #: All prompts but a few are at most so long.
    usual_prompt: int = 600


def draw_requests(count: int, limits: Limits, seed: int) -> list[Drawn]:
    """Return the same requests for the same arguments. A third of the prompts begin as one before."""
    rng = random.Random(seed)
    drawn: list[Drawn] = []
    for _ in range(count):
        prompt = _prompt(rng, limits, drawn)
        drawn.append(Drawn(prompt, _options(rng, limits)))
    return drawn


def _prompt(rng: random.Random, limits: Limits, before: list[Drawn]) -> tuple[int, ...]:
    longest = limits.max_model_len - limits.max_output - 1
    length = int(math.exp(rng.uniform(0, math.log(limits.usual_prompt))))
    length = rng.randint(1, limits.usual_prompt) if rng.random() < 0.5 else length
    length = min(rng.randint(limits.usual_prompt, 4 * limits.usual_prompt) if rng.random() < 0.04 else length, longest)
    own = tuple(rng.randrange(limits.vocab_size) for _ in range(length))
    if before and rng.random() < 0.33:
        other = rng.choice(before).prompt
        shared = other[: rng.randint(1, len(other))]
        return (shared + own[: rng.randint(1, 64)])[:longest]
    return own


def _options(rng: random.Random, limits: Limits) -> dict[str, Any]:
    is_greedy = rng.random() < 0.4
    options: dict[str, Any] = {
        "max_tokens": rng.randint(limits.min_output, limits.max_output),
        "temperature": 0.0 if is_greedy else rng.choice((0.3, 0.8, 1.0, 1.5)),
        "seed": rng.getrandbits(64),
        "ignore_eos": True,
    }
    if rng.random() < _PLAIN:
        return options
    # With the plain ones a third have no logprobs.
    if rng.random() < 0.95:
        options["logprobs"] = rng.choice((0, 0, rng.randint(1, 20), 20))
    sampled = {"top_k": (1, 5, 50, 1000), "top_p": (0.5, 0.9, 0.95), "min_p": (0.02, 0.2)}
    shaped = {"repetition_penalty": (1.3, 0.8), "presence_penalty": (1.0, -0.5), "frequency_penalty": (0.7, -0.1)}
    for name, values in ({} if is_greedy else sampled).items():
        if rng.random() < 0.3:
            options[name] = rng.choice(values)
    for name, values in shaped.items():
        if rng.random() < 0.15:
            options[name] = rng.choice(values)
    return options | _lists(rng, limits, options["max_tokens"])


def _lists(rng: random.Random, limits: Limits, max_tokens: int) -> dict[str, Any]:
    def ids(count: int) -> list[int]:
        return sorted(rng.sample(range(limits.vocab_size), count))

    many = min(limits.vocab_size // 4, 2000)
    makers: list[tuple[str, float, Any]] = [
        ("logit_bias", 0.15, lambda: {token: rng.uniform(-8, 8) for token in ids(rng.randint(1, 64))}),
        ("stop_token_ids", 0.1, lambda: ids(rng.randint(1, many))),
        ("min_tokens", 0.1, lambda: rng.randint(1, max_tokens)),
        ("prompt_logprobs", 0.1, lambda: rng.choice((0, 5, 20))),
        ("score_token_ids", 0.08, lambda: ids(rng.randint(1, 6))),
        ("num_outputs", 0.08, lambda: rng.randint(2, 3)),
    ]
    options = {name: make() for name, share, make in makers if rng.random() < share}
    if limits.has_grammars and rng.random() < 0.06:
        return options | {"regex": rng.choice(_REGEXES)}
    return options | ({"allowed_token_ids": ids(many)} if rng.random() < 0.05 else {})


def request_of(drawn: Drawn, name: str, *, continued: tuple[int, ...] = (), share: bool = False) -> Request:
    """Return what the engine gets; `continued`: ids of its output that are given, `share`: use the prefix cache.

    Besides options of `LLM` a "constraint", a ConstraintAsk, may be among the options.
    """
    options = drawn.options
    fields = {each: options[each] for each in SamplingParams.__struct_fields__ if each in options}
    fields |= {"logit_bias": tuple(fields.get("logit_bias", {}).items())} if "logit_bias" in fields else {}
    fields |= {"allowed_token_ids": tuple(fields["allowed_token_ids"])} if "allowed_token_ids" in fields else {}
    stops = tuple(options.get("stop_token_ids", ()))
    constraint = ConstraintAsk("regex", options["regex"]) if "regex" in options else options.get("constraint")
    return Request(
        name,
        drawn.prompt,
        SamplingParams(**fields),
        StopParams(options["max_tokens"], min_tokens=options.get("min_tokens", 0), stop_token_ids=stops),
        time.monotonic(),
        num_outputs=drawn.num_outputs if not continued else 1,
        bypass_prefix_cache=not share,
        continued_ids=continued,
        logprobs=LogprobParams(
            options.get("logprobs", -1), options.get("prompt_logprobs", -1), tuple(options.get("score_token_ids", ()))
        ),
        constraint=write_grammar(constraint) if constraint is not None else None,
    )


def _range(count: int) -> str:
    bounds = (1, 16, 64, 128, 256, 512, 1024)
    low = max(bound for bound in bounds if bound <= count)
    return f"{low}+"
