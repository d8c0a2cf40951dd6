"""The choice of the drafter and of the number of drafts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from photon_grpc.config.eagle3 import Eagle3Config, is_eagle3, read_eagle3_dir, states_before
from photon_grpc.config.flags import ModelFlags, ServeConfig, SpeculationConfig
from photon_grpc.config.model_dir import TOKENIZER_FILE, ModelConfig, read_model_dir
from photon_grpc.config.resolve import GRAMMAR, NGRAM
from photon_grpc.config.sizes import Sizes
from photon_grpc.config.weight_bytes import format_of, linear_bytes
from photon_grpc.core.batch import DRAFT_COUNTS
from photon_grpc.engine.scheduler.adaptive_drafting import AdaptiveDrafting, AdaptiveForcedDrafting
from photon_grpc.engine.scheduler.drafting import Drafting, FixedDrafting, ForcedDrafting, NoDrafting
from photon_grpc.engine.scheduler.step_costs import DraftCost
from photon_grpc.errors import ConfigError, ModelLoadError
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import build, weights
from photon_grpc.models.decoder import Decoder
from photon_grpc.models.eagle3 import Eagle3Head, build_head, has_kernels
from photon_grpc.models.weights import OnProgress
from photon_grpc.runner.buckets import LONG_BUCKETS
from photon_grpc.runner.draft_model import ModelSpeculation
from photon_grpc.runner.drafting import NO_SPECULATION, GivenSpeculation, NgramSpeculation, Speculation
from photon_grpc.runner.eagle3 import Eagle3Speculation

_FIELD = "speculative_model"
_DEFAULT_COUNT = 3
#: Until it is measured: seconds to launch a pass of a drafter, and a head's part of the bytes of a step.
_LAUNCH_S, _HEAD_SHARE = 2.5e-4, 0.03


def check(config: SpeculationConfig, served: ModelConfig, sizes: Sizes, num_stages: int = 1) -> None:
    """Raise ConfigError for what cannot draft for a model, as far as flags and the files config.json tell.

    `num_stages`: those of the served model.
    """
    name = config.speculative_model
    if name in ("", NGRAM, GRAMMAR):
        return
    if all(served.windows):
        raise ConfigError(
            f"--speculative-model {name}: all layers of {served.architecture} have a sliding window, which frees "
            f"KV blocks that a draft model needs; use {NGRAM} or {GRAMMAR}",
            field=_FIELD,
        )
    if _is_head(name):
        _read_head(name, served)
        if num_stages > 1:
            raise ConfigError(
                f"--speculative-model {name}: a head reads states after several layers, which are on different GPUs "
                f"with --pipeline-parallel-size {num_stages}",
                field=_FIELD,
            )
    else:
        _read_draft(name, served, sizes)


def check_tensors(config: ServeConfig, served: ModelConfig, sizes: Sizes, target: Decoder, until_s: float) -> int:
    """Raise ConfigError unless the files of a drafter that `check` allows have its tensors, with right values.

    Return the bytes of values that were not read by `until_s`. `target`: a decoder of the served model, maybe empty.
    """
    name = config.speculation.speculative_model
    if name in ("", NGRAM, GRAMMAR):
        return 0
    with _about(name):
        if _is_head(name):
            head = _read_head(name, served)
            # Of its values only d2t can be wrong: all others have 16 bits or more.
            return weights.check_values(build_head(head, target, 1), head.layer)
        draft = _read_draft(name, served, sizes)
        decoder = build(
            draft,
            dtype=target.dtype,
            device=target.device,
            kernels=target.kernels,
            max_model_len=sizes.max_model_len,
            method=methods(format_of(draft, _of_a_drafter(config.model))),
        )
        return weights.check_values(decoder, draft, until_s)


@contextlib.contextmanager
def _about(directory: str) -> Iterator[None]:
    """Turn a ModelLoadError of the block into a ConfigError that names the flag."""
    try:
        yield
    except ModelLoadError as error:
        raise ConfigError(f"--speculative-model {directory}: {error}", field=_FIELD) from None


def _of_a_drafter(flags: ModelFlags) -> ModelFlags:
    """Return the flags with which a draft model is loaded: in the format of its own checkpoint."""
    return replace(flags, quantization="auto", quantization_head="none", quantization_embedding="none")


def num_drafts(config: SpeculationConfig) -> int:
    """Return the maximum number of drafts per row."""
    return (config.num_speculative_tokens or _DEFAULT_COUNT) if config.speculative_model else 0


@dataclass(frozen=True, slots=True)
class DrafterLoader:
    """Loads the draft model or head for a loaded model.

    Args:
        config: of the server.
        target: the model.
        sizes: its limits.
        load: loads another model, by its own config and one of the server.
        progress: called with (bytes done, bytes in all) while a head is loaded.
    """

    config: ServeConfig
    target: Decoder
    sizes: Sizes
    load: Callable[[ModelConfig, ServeConfig], Decoder]
    progress: OnProgress

    def model(self, config: ModelConfig) -> Decoder:
        """Load a draft model, in the format of its own checkpoint."""
        return self.load(config, replace(self.config, model=_of_a_drafter(self.config.model)))

    def head(self, config: Eagle3Config) -> Eagle3Head:
        """Load an EAGLE-3 head. Raise ModelLoadError if it does not fit."""
        # Steps of few tokens are padded to larger shapes.
        head = build_head(config, self.target, max(self.sizes.max_num_batched_tokens, LONG_BUCKETS[-1]))
        flags = self.config.model
        weights.fill(head, config.layer, flags.load_format, flags.seed, self.progress)
        if has_kernels(self.target):
            head.fuse()
        return head


def speculation(config: SpeculationConfig, served: ModelConfig, sizes: Sizes, drafts: DrafterLoader) -> Speculation:
    """Return the runner's Speculation, which `check` has allowed. Raise ConfigError and ModelLoadError."""
    name, count = config.speculative_model, num_drafts(config)
    if not name:
        return NO_SPECULATION
    if name == NGRAM:
        return NgramSpeculation(count)
    if name == GRAMMAR:
        return GivenSpeculation(count)
    if _is_head(name):
        head = _read_head(name, served)
        with _about(name):
            return Eagle3Speculation(count, drafts.head(head))
    draft = _read_draft(name, served, sizes)
    with _about(name):
        return ModelSpeculation(count, drafts.model(draft))


def drafting(config: SpeculationConfig, step_bytes: Callable[[int], float]) -> Drafting:
    """Return the scheduler's Drafting; `step_bytes` is that of AdaptiveDrafting, of the served model."""
    count, name = num_drafts(config), config.speculative_model
    if not count:
        return NoDrafting()
    counts, is_fixed = tuple(each for each in DRAFT_COUNTS if each <= count), config.speculation_control == "fixed"
    if name == GRAMMAR:
        return ForcedDrafting(count) if is_fixed else AdaptiveForcedDrafting(counts, step_bytes)
    if is_fixed:
        return FixedDrafting(count)
    return AdaptiveDrafting(counts, step_bytes, DraftCost() if name == NGRAM else _of_passes(name, step_bytes))


def _of_passes(directory: str, step_bytes: Callable[[int], float]) -> DraftCost:
    """Return what passes of a head or a draft model are assumed to cost: by what they read, and to launch them."""
    if _is_head(directory):
        return DraftCost(_LAUNCH_S, _LAUNCH_S, _HEAD_SHARE)
    read = linear_bytes(read_model_dir(Path(directory)), None) / step_bytes(1)
    return DraftCost(_LAUNCH_S, _LAUNCH_S, read)


def _is_head(directory: str) -> bool:
    try:
        return is_eagle3(Path(directory))
    except ModelLoadError as error:
        raise ConfigError(f"--speculative-model {directory} (or {NGRAM}, {GRAMMAR}): {error}", field=_FIELD) from None


def _read_head(directory: str, served: ModelConfig) -> Eagle3Config:
    """Read a head's config. Raise ConfigError if it does not fit the served model."""
    with _about(directory):
        head = read_eagle3_dir(Path(directory))
        states_before(head, served.hidden_size, served.vocab_size, served.num_layers)
    return head


def _read_draft(directory: str, served: ModelConfig, sizes: Sizes) -> ModelConfig:
    """Read a draft model's config. Raise ConfigError if it cannot draft for the served model."""
    try:
        draft = read_model_dir(Path(directory))
    except ModelLoadError as error:
        raise ConfigError(f"--speculative-model {directory} (or {NGRAM}, {GRAMMAR}): {error}", field=_FIELD) from None
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
        what = f"its {TOKENIZER_FILE} gives other ids to tokens than the model's"
        if not (draft.has_tokenizer and served.has_tokenizer):
            what = f"{'the model' if draft.has_tokenizer else 'it'} has no {TOKENIZER_FILE} to compare ids with"
        raise ConfigError(f"--speculative-model {directory}: {what}", field=_FIELD)
    return draft


def _vocabulary(config: ModelConfig) -> object:
    """Return the ids of a tokenizer's tokens; None without a tokenizer."""
    if not config.has_tokenizer:
        return None
    return msgspec.json.decode((config.path / TOKENIZER_FILE).read_bytes())["model"].get("vocab")
