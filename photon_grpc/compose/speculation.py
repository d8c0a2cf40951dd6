"""The choice of what drafts and of how much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from photon_grpc.config.flags import DRAFT_COUNTS, SpeculationConfig
from photon_grpc.config.model_dir import TOKENIZER_FILE, ModelConfig, read_model_dir
from photon_grpc.config.sizes import Sizes
from photon_grpc.engine.scheduler.adaptive_drafting import AdaptiveDrafting
from photon_grpc.engine.scheduler.drafting import Drafting, FixedDrafting, NoDrafting
from photon_grpc.errors import ConfigError, ModelLoadError
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.draft_model import ModelSpeculation
from photon_grpc.runner.drafting import NO_SPECULATION, NgramSpeculation, Speculation

NGRAM = "ngram"
_FIELD = "speculative_model"
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


def speculation(
    config: SpeculationConfig, served: ModelConfig, sizes: Sizes, load: Callable[[ModelConfig], Decoder]
) -> Speculation:
    """Return how the runner drafts for the served model. Raise ConfigError and ModelLoadError.

    Args:
        load: loads a draft model.
    """
    check(config)
    if not config.speculative_model:
        return NO_SPECULATION
    if config.speculative_model == NGRAM:
        return NgramSpeculation(num_drafts(config))
    draft = _read_draft(config.speculative_model, served, sizes)
    return ModelSpeculation(num_drafts(config), load(draft))


def drafting(config: SpeculationConfig) -> Drafting:
    """Return what decides how many tokens a step drafts."""
    count = num_drafts(config)
    if not count:
        return NoDrafting()
    if config.speculation_control == "fixed":
        return FixedDrafting(count)
    return AdaptiveDrafting(tuple(each for each in DRAFT_COUNTS if each <= count))


def _read_draft(directory: str, served: ModelConfig, sizes: Sizes) -> ModelConfig:
    """Read a draft model. Raise ConfigError if it cannot draft for the served one."""
    try:
        draft = read_model_dir(Path(directory))
    except ModelLoadError as error:
        raise ConfigError(f"--speculative-model {directory} (or {NGRAM}): {error}", field=_FIELD) from None
    if draft.vocab_size != served.vocab_size:
        raise ConfigError(
            f"--speculative-model {directory}: its vocabulary has {draft.vocab_size} ids, that of the model "
            f"{served.vocab_size}",
            field=_FIELD,
            needed=served.vocab_size,
            limit=draft.vocab_size,
        )
    if draft.max_position_embeddings < sizes.max_model_len:
        raise ConfigError(
            f"--speculative-model {directory}: its context of {draft.max_position_embeddings} tokens is shorter than "
            f"the model's {sizes.max_model_len} (--max-model-len)",
            field=_FIELD,
            needed=sizes.max_model_len,
            limit=draft.max_position_embeddings,
        )
    if _vocabulary(draft) != _vocabulary(served):
        raise ConfigError(
            f"--speculative-model {directory}: its {TOKENIZER_FILE} gives other ids to tokens than the model's",
            field=_FIELD,
        )
    return draft


def _vocabulary(config: ModelConfig) -> object:
    """Return the ids of a tokenizer's tokens; None without a tokenizer."""
    if not config.has_tokenizer:
        return None
    return msgspec.json.decode((config.path / TOKENIZER_FILE).read_bytes())["model"].get("vocab")
