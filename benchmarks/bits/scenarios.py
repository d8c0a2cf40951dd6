"""The ways in which the same requests are computed: what each model is loaded with, and what runs on it."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.bits.company import Scenario

#: Alone: one row a step, the whole prompt at once, nothing cached, nothing drafted.
ALONE = Scenario("alone", company=1, max_num_batched_tokens=1 << 20, may_draft=False)


class Instance(NamedTuple):
    """A loaded model.

    A flag {shorter} stands for the directory of the same model with a layer less, {head} for that of an EAGLE-3 head
    with random weights.
    """

    name: str
    flags: tuple[str, ...]
    scenarios: tuple[Scenario, ...]
    #: The share of right drafts, of a drafter that knows the outputs; None: the model's own drafter, if it has one.
    acceptance: float | None = None


#: One thing at a time, so that a difference names its cause; then all together.
_ONE_BY_ONE = (
    Scenario("alone again", company=1, share=0.1),
    Scenario("companies to 8", company=8, share=0.5),
    Scenario("companies to 64", company=64),
    Scenario("companies to 300"),
    Scenario("companies to 300, plain", only="plain"),
    Scenario("alone, chunks of 16", company=1, max_num_batched_tokens=16, share=0.05),
    Scenario("alone, chunks of 100", company=1, max_num_batched_tokens=100, share=0.1),
    Scenario("alone, prefix cache", company=1, prefix_caching=True, passes=2, share=0.1),
    Scenario("alone, continued", company=1, continuations=1, share=0.1),
    Scenario("companies to 64, chunks of 16", company=64, max_num_batched_tokens=16, share=0.1),
    Scenario("companies to 300, chunks of 64", max_num_batched_tokens=64, share=0.3),
    Scenario("companies to 300, chunks of 512", max_num_batched_tokens=512),
    Scenario("companies to 300, chunks of 2048", max_num_batched_tokens=2048),
    Scenario("prefix cache", prefix_caching=True, passes=2),
    Scenario("prefix cache, evicted", company=64, prefix_caching=True, passes=2, kv_requests=4, share=0.5),
    Scenario("preempted", company=100, kv_requests=2, crowded=True, share=0.5),
    Scenario("preempted, chunks of 200, cache", company=200, kv_requests=5, crowded=True,
             max_num_batched_tokens=200, share=0.5, prefix_caching=True),
    Scenario("continued", continuations=1),
    Scenario("continued at every id", continuations=-1, share=0.03),
    Scenario("static batches", company=32, policy="static", share=0.3),
)  # fmt: skip
_ALL_TOGETHER = Scenario(
    "all together",
    prefix_caching=True,
    passes=2,
    kv_requests=15,
    crowded=True,
    max_num_batched_tokens=700,
    continuations=1,
)
_SHORT = (Scenario("companies to 300", share=0.5), Scenario("chunks of 300, cache", max_num_batched_tokens=300,
          prefix_caching=True, passes=2, share=0.3))  # fmt: skip

#: Small companies, whose steps verify drafts in graphs, and larger ones, whose steps do so eagerly.
_DRAFTED = (
    Scenario("alone", company=1, share=0.2),
    Scenario("companies to 8", company=8, share=0.5),
    Scenario("companies to 64", company=64),
    Scenario("chunks of 100, cache, preempted", company=64, max_num_batched_tokens=100, prefix_caching=True, passes=2,
             kv_requests=3, crowded=True, share=0.3),
    Scenario("continued", company=64, continuations=1, share=0.5),
    Scenario("companies to 64, four times", company=64, passes=4),
)  # fmt: skip


def _drafts(count: int, model: str = "ngram") -> tuple[str, ...]:
    flags = ("--speculative-model", model, "--speculation-control", "fixed")
    return (*flags, "--num-speculative-tokens", str(count))


INSTANCES = (
    Instance("default", (), (*_ONE_BY_ONE, _ALL_TOGETHER)),
    Instance(
        "blocks of 16, 3,072 positions",
        ("--block-size", "16", "--max-model-len", "3072", "--num-blocks", "4000"),
        (*_SHORT, Scenario("preempted", company=100, kv_requests=2, crowded=True, share=0.3)),
    ),
    Instance("contiguous", ("--kv-layout", "contiguous"), (Scenario("companies to 300", contiguous=True, share=0.5),)),
    Instance(
        "5 rows, 48 tokens, blocks of 32",
        ("--max-num-seqs", "5", "--max-num-batched-tokens", "48", "--block-size", "32"),
        (Scenario("companies to 5", company=5, share=0.1),),
    ),
    *(
        Instance(f"{count} drafts, {acceptance:.0%} right", _drafts(count), _DRAFTED, acceptance)
        for count, acceptance in ((1, 0.8), (3, 0.9), (7, 0.95))
    ),
    Instance("3 drafts, n-grams", _drafts(3), _DRAFTED),
    Instance("7 drafts, n-grams", _drafts(7), _DRAFTED),
    Instance("3 drafts, forced ones alone", _drafts(3, "grammar"), _DRAFTED),
    Instance("3 drafts of a draft model", _drafts(3, "{shorter}"), _DRAFTED),
    Instance("3 drafts of an EAGLE-3 head", _drafts(3, "{head}"), _DRAFTED),
    Instance("eager", ("--enforce-eager",), (Scenario("alone", company=1, share=0.03), *_SHORT)),
    Instance(
        "speculating",
        ("--speculative-model", "ngram", "--num-speculative-tokens", "3", "--speculation-control", "fixed"),
        (
            Scenario("alone", company=1, share=0.1),
            *_SHORT,
            Scenario("preempted", company=100, kv_requests=2, crowded=True, share=0.3),
        ),
    ),
    Instance("restarted", (), (Scenario("alone", company=1, share=0.05), *_SHORT)),
)


def more(seed: int) -> Scenario:
    """Return one more run of everything together, until enough is compared."""
    tokens = (2048, 16 + 37 * (seed % 40), 512, 8192)[seed % 4]
    kv_requests = (None, 8, 25)[seed % 3]
    return Scenario(
        f"all together {seed}", prefix_caching=seed % 2 == 0, kv_requests=kv_requests, crowded=True,
        max_num_batched_tokens=tokens, continuations=seed % 2, company=(300, 300, 20, 100)[seed // 2 % 4],
    )  # fmt: skip
