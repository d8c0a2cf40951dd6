"""The choice of what drafts and of how much."""

from __future__ import annotations

from photon_grpc.config.flags import DRAFT_COUNTS, SpeculationConfig
from photon_grpc.engine.scheduler.drafting import Drafting, FixedDrafting, NoDrafting
from photon_grpc.errors import ConfigError
from photon_grpc.runner.drafting import NO_SPECULATION, NgramSpeculation, Speculation

NGRAM = "ngram"
_DEFAULT_COUNT = 3


def check(config: SpeculationConfig) -> None:
    """Raise ConfigError for a combination of flags that means nothing."""
    count = config.num_speculative_tokens
    if count is None:
        return
    if not config.speculative_model:
        raise ConfigError("--num-speculative-tokens needs --speculative-model", field="num_speculative_tokens")
    if count not in DRAFT_COUNTS:
        allowed = ", ".join(map(str, DRAFT_COUNTS))
        raise ConfigError(
            f"--num-speculative-tokens must be one of {allowed}, got {count}",
            field="num_speculative_tokens",
            needed=count,
        )


def num_drafts(config: SpeculationConfig) -> int:
    """Return the most drafts of a row."""
    return (config.num_speculative_tokens or _DEFAULT_COUNT) if config.speculative_model else 0


def speculation(config: SpeculationConfig) -> Speculation:
    """Return how the runner drafts. Raise ConfigError."""
    check(config)
    if not config.speculative_model:
        return NO_SPECULATION
    if config.speculative_model == NGRAM:
        return NgramSpeculation(num_drafts(config))
    raise ConfigError(
        f"--speculative-model {config.speculative_model}: only ngram is available", field="speculative_model"
    )


def drafting(config: SpeculationConfig) -> Drafting:
    """Return what decides how many tokens a step drafts."""
    count = num_drafts(config)
    return FixedDrafting(count) if count else NoDrafting()
