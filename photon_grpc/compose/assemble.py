"""Choose and assemble the engine's parts by the settings: model, cache, runner, scheduler, engine."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from llguidance import LLTokenizer
from msgspec.structs import replace

from photon_grpc import demo
from photon_grpc.compose.engine_facts import facts_of
from photon_grpc.compose.kernel_cache import ensure_writable
from photon_grpc.compose.kv_form import KVForm, choose_kv_form
from photon_grpc.compose.speculation import DrafterLoader, check_tensors, drafting, num_drafts, speculation
from photon_grpc.compose.speculation import check as check_speculation
from photon_grpc.compose.threads import available_cores
from photon_grpc.config.cuda_device import NO_CUDA
from photon_grpc.config.flags import CacheConfig, ParallelConfig, ServeConfig, ServerConfig
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.config.sizes import Sizes, decide_sizes
from photon_grpc.config.weight_bytes import format_of, refuse_without_room, step_bytes
from photon_grpc.core.frames import Facts
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.ports import EnginePorts, Inbox, Runner
from photon_grpc.engine.blocks.allocation import AllocationPolicy, GrowOnDemand
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.blocks.contiguous import ReserveContext
from photon_grpc.engine.blocks.prefix_index import NoPrefixIndex, PrefixIndex, RadixIndex
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs, Grammars, MaskMemory, NoGrammars
from photon_grpc.engine.constraints.guidance import GuidanceGrammars, read_vocabulary
from photon_grpc.engine.engine import Engine
from photon_grpc.engine.quotas import NO_QUOTAS, NoQuotas, SharedQuotas
from photon_grpc.engine.scheduler.chunking import Chunked, Unchunked
from photon_grpc.engine.scheduler.policy import POLICIES, FairShare, Policy
from photon_grpc.engine.scheduler.quarantine import Quarantine
from photon_grpc.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from photon_grpc.engine.step_trace import JsonlStepTrace, StepTrace
from photon_grpc.engine.trace_file import TraceFile, check_trace_file
from photon_grpc.errors import ConfigError, ModelLoadError, NumericFailure
from photon_grpc.kernels import TORCH, Kernels, select
from photon_grpc.kernels.dtypes import dtype_of, name_of
from photon_grpc.kernels.lang.precompile import hash_compiler_ahead
from photon_grpc.layers.parallel.group import Mesh, MeshSizes
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import build, weights
from photon_grpc.models.decoder import Decoder
from photon_grpc.models.fused import fuse
from photon_grpc.runner.library import forbid_split_k
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.ranks import ALONE, LeadingRanks, Ranks
from photon_grpc.runner.start import OnStage, RunnerLimits, RunnerStart
from photon_grpc.runner.warm_up import warm_up

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A loaded model and all parts of an engine except its bridge."""

    facts: Facts
    config: ServeConfig
    sizes: Sizes
    runner: Runner
    #: Duration of a step of one token.
    token_s: float
    #: The tokenizer's vocabulary for grammars; None: outputs cannot be constrained.
    vocabulary: LLTokenizer | None
    #: Tokens of a step -> bytes of weights that it is expected to read.
    step_bytes: Callable[[int], float]
    ranks: LeadingRanks = ALONE

    def engine(self, ports: EnginePorts, quarantine: Quarantine | None = None) -> Engine:
        """Make the engine, with a quarantine if another engine replaces it when it dies."""
        kept, scheduling = self.config.cache, self.config.scheduler
        pool = BlockPool(self.runner.kv, self.runner.num_blocks, _index(kept, self.runner.kv), _allocation(kept))
        chunking = Chunked() if scheduling.enable_chunked_prefill else Unchunked()
        sizes, depth = self.sizes, max(self.runner.depth, 1)
        limits = SchedulerLimits(sizes.max_num_seqs, sizes.max_num_batched_tokens, depth, chunking)
        policy = _policy(scheduling.scheduling_policy, self.config.server)
        constraints = ConstrainedOutputs(self._grammars(ports.inbox), self.facts.vocab_size, self.mask_memory())
        drafts = drafting(self.config.speculation, self.step_bytes)
        scheduler = Scheduler(limits, policy, pool, drafts, constraints, quarantine)
        quotas, trace = _quotas(self.config.server), _trace(scheduling.step_trace, self.facts)
        engine = Engine(scheduler, self.runner, ports, self.facts, quotas, trace)
        engine.step_times.stepped(1, self.token_s)
        return engine

    def mask_memory(self) -> MaskMemory:
        """Return memory for the masks of the runner's steps."""
        device = pick_device(self.config.device.device)
        return MaskMemory(max(self.runner.depth, 1), self.ranks.mask_memory(device))

    def _grammars(self, inbox: Inbox) -> Grammars:
        if self.vocabulary is None:
            return NoGrammars()
        return GuidanceGrammars(self.vocabulary, inbox.wake, num_threads=max(1, available_cores() - 1))


class RankDevice(NamedTuple):
    """A rank's device, dtype and kernels, and its place in the mesh."""

    device: torch.device
    kernels: Kernels
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model and its runner, on one rank."""

    model_config: ModelConfig
    sizes: Sizes
    kv_form: KVForm
    decoder: Decoder
    runner: ModelRunner
    #: Duration of a step of one token.
    token_s: float
    facts: Facts


def assemble(config: ServeConfig, progress: OnStage, ranks: LeadingRanks = ALONE) -> Assembled:
    """Load the model and make all parts of the engine.

    `progress(stage, done, total)` is called with stage "weights" (bytes), "warm-up" (steps) and "kernels" (those that
    must be compiled). Raise ConfigError and ModelLoadError.

    Args:
        ranks: those that compute the model together; each calls `load_runner` alike.
    """
    with ranks.starting():
        check_step_trace(config)
        loaded = load_runner(config, progress, ranks)
        vocabulary = read_vocabulary(loaded.model_config)
        facts = replace(loaded.facts, has_grammars=vocabulary is not None, max_drafts=num_drafts(config.speculation))
        _log_savings(loaded)
        runner = ranks.lead(loaded.runner)
    read = cache(partial(step_bytes, loaded.model_config))
    return Assembled(facts, config, loaded.sizes, runner, loaded.token_s, vocabulary, read, ranks)


def load_runner(config: ServeConfig, progress: OnStage, ranks: Ranks = ALONE) -> Loaded:
    """Load this rank's part of the model and compute its first steps, with the other ranks. Raise as `assemble`."""
    device, kernels = pick_kernels(config, ranks.mesh.world.rank)
    if config.device.numerics == "strict" and device.type == "cuda":
        forbid_split_k()
    if device.type == "cuda" and kernels is not TORCH:
        hash_compiler_ahead()
    model_config = read_model_dir(config.model.model or Path(demo.TARGET))
    sizes = decide_sizes(model_config, config, on_cuda=device.type == "cuda")
    kv_form = choose_kv_form(config, model_config, device, kernels)
    check_speculation(config.speculation, model_config, sizes, config.parallel.pipeline_parallel_size)
    _check_drafter(model_config, config, sizes)
    rank = RankDevice(device, kernels, ranks.mesh)
    decoder = _load(model_config, config, rank, sizes, progress, kv_form)
    # A draft model is whole on every rank.
    whole = rank._replace(mesh=Mesh())
    drafts = DrafterLoader(
        config, decoder, sizes, lambda draft, own: _load(draft, own, whole, sizes, progress, KVForm()),
        partial(progress, "weights"),
    )  # fmt: skip
    drafted = speculation(config.speculation, model_config, sizes, drafts)
    progress("warm-up", 0, 1)
    start = RunnerStart(_limits(config, sizes), progress, available_cores(), drafted, ranks)
    runner = _runner(start, decoder, config.model.model or "the embedded model")
    token_s = warm_up(runner)
    decoder.forget_counts()
    progress("warm-up", 1, 1)
    facts = facts_of(model_config, decoder, runner, config, sizes, kv_form)
    _check_equal(ranks, facts.numerics.version)
    return Loaded(model_config, sizes, kv_form, decoder, runner, token_s, facts)


def _check_drafter(model_config: ModelConfig, config: ServeConfig, sizes: Sizes) -> None:
    """Raise ConfigError, before the model is loaded, for a drafter whose files do not fit it."""
    if config.speculation.speculative_model and config.model.load_format != "dummy":
        dtype = pick_dtype(model_config, config)
        empty = build(model_config, dtype=dtype, device="cpu", kernels=TORCH, max_model_len=sizes.max_model_len)
        check_tensors(config, model_config, sizes, empty, until_s=0.0)


def _log_savings(loaded: Loaded) -> None:
    """Log how much memory the formats save."""
    runner, decoder = loaded.runner, loaded.decoder
    loaded.kv_form.log_savings(runner.kv, runner.num_blocks, decoder.dtype)
    if loaded.facts.quantization:
        held, plain = weights.linear_bytes(decoder)
        more, dtype = max(0, plain - held) // runner.kv.block_bytes, name_of(decoder.dtype)
        _LOG.info("weights leave room for %d more KV blocks than in %s; there are %d", more, dtype, runner.num_blocks)


def _check_equal(ranks: Ranks, version: str) -> None:
    """Raise ConfigError unless all ranks have the same numerics: each samples its own copy of every id."""
    number = zlib.crc32(version.encode())
    if ranks.minimum(number) != -ranks.minimum(-number):
        raise ConfigError(
            "the ranks compute with different numerics: they need GPUs of one kind and the same libraries",
            field="tensor_parallel_size",
        )


def mesh_sizes(parallel: ParallelConfig) -> MeshSizes:
    return MeshSizes(parallel.tensor_parallel_size, parallel.expert_parallel_size, parallel.pipeline_parallel_size)


def check_parallel(parallel: ParallelConfig, device: torch.device) -> None:
    """Raise ConfigError for more ranks than GPUs."""
    found, needed = torch.cuda.device_count(), parallel.num_ranks
    if device.type == "cuda" and found < needed:
        asked = {name: size for name, size in asdict(parallel).items() if size > 1}
        flags = " and ".join(f"--{name.replace('_', '-')} {size}" for name, size in asked.items())
        needs = "needs as many" if len(asked) == 1 else f"need {needed}"
        message = f"{flags} {needs} GPUs, there are {found} (CUDA_VISIBLE_DEVICES)"
        raise ConfigError(message, field=next(iter(asked)), needed=needed, limit=found)


def check_step_trace(config: ServeConfig) -> None:
    """Raise ConfigError if the step trace cannot be written."""
    if config.scheduler.step_trace:
        check_trace_file(config.scheduler.step_trace)


def pick_kernels(config: ServeConfig, rank: int = 0) -> tuple[torch.device, Kernels]:
    """Return the device of a rank and its kernels. Raise ConfigError if this machine lacks one of them."""
    device = pick_device(config.device.device, rank)
    return device, _kernels(config, device)


def pick_device(name: str, rank: int = 0) -> torch.device:
    """Return the device of a rank for a value of --device. Raise ConfigError for "cuda" if there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(NO_CUDA, field="--device")
    use_cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda", rank) if use_cuda else torch.device("cpu")


def pick_dtype(model_config: ModelConfig, config: ServeConfig) -> torch.dtype:
    """Return the type in which the model computes."""
    return dtype_of(model_config.dtype if config.model.dtype == "auto" else config.model.dtype)


def _load(
    model_config: ModelConfig,
    config: ServeConfig,
    rank: RankDevice,
    sizes: Sizes,
    progress: OnStage,
    kv_form: KVForm,
) -> Decoder:
    device, kernels, mesh = rank
    dtype = pick_dtype(model_config, config)
    weight_format = format_of(model_config, config.model)
    if device.type == "cuda":
        refuse_without_room(model_config, config.model, torch.cuda.mem_get_info(device)[0], mesh.world.size)
    decoder = build(
        model_config,
        dtype=dtype,
        device=device,
        kernels=kernels,
        max_model_len=sizes.max_model_len,
        method=methods(weight_format),
        kv_dtype=kv_form.dtype,
        mesh=mesh,
    )
    kv_form.set_scales(decoder)
    check_cache(config.cache, decoder, sizes)
    weights.fill(decoder, model_config, config.model.load_format, config.model.seed, partial(progress, "weights"))
    if weight_format is not None:
        saving = _saving(*weights.linear_bytes(decoder), decoder.dtype)
        _LOG.info("weights: %s, %s%s", weight_format.name, saving, _peak(decoder.device))
    # The fused layers are Triton kernels; if they do not fit the model, the decoder stays unfused.
    return decoder if kernels is TORCH else fuse(decoder) or decoder


def _saving(held: int, plain: int, dtype: torch.dtype) -> str:
    """Return such as "4.61 GB, 3.43 GB less than in bfloat16"."""
    less = plain - held
    return f"{held / 1e9:.3g} GB, {abs(less) / 1e9:.3g} GB {'less' if less >= 0 else 'more'} than in {name_of(dtype)}"


def _peak(device: torch.device) -> str:
    """Return such as "; 9.1 GB in use, 9.6 GB at the peak of loading" on CUDA."""
    if device.type != "cuda":
        return ""
    now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return f"; {now / 1e9:.3g} GB in use, {peak / 1e9:.3g} GB at the peak of loading"


def _limits(config: ServeConfig, sizes: Sizes) -> RunnerLimits:
    device = config.device
    return RunnerLimits(sizes, config.cache.num_blocks, device.gpu_memory_utilization, not device.enforce_eager)


def _runner(start: RunnerStart, decoder: Decoder, model: str) -> ModelRunner:
    """Make the runner. Raise ModelLoadError now, not at the first request, if the weights yield NaN or infinity."""
    try:
        return start.runner(decoder)
    except NumericFailure as error:
        dtype = name_of(decoder.dtype)
        raise ModelLoadError(
            f"{model}: {error}; its weights are damaged, or its values exceed the range of {dtype} (--dtype)"
        ) from None


def _kernels(config: ServeConfig, device: torch.device) -> Kernels:
    kind = config.device.kernels
    try:
        kernels = select(kind, device)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"--kernels {kind}: {error}", field="kernels") from None
    if kernels is not TORCH:
        ensure_writable()
    return kernels


def check_cache(cache: CacheConfig, decoder: Decoder, sizes: Sizes) -> None:
    """Raise ConfigError, before weights are loaded, for cache settings that the model's layers do not allow."""
    plan = KVPlan(decoder.kv_groups, sizes.block_size, sizes.max_chunk)
    if cache.kv_layout == "contiguous" and any(group.window for group in plan.groups):
        message = "--kv-layout contiguous: this model has sliding windows; use paged"
        raise ConfigError(message, field="kv_layout")
    needed = plan.blocks(1)
    if cache.num_blocks and cache.num_blocks < needed:
        message = (
            f"--num-blocks must be at least {needed}, got {cache.num_blocks}: a token takes one block in each group of "
            "layers with the same window"
        )
        raise ConfigError(message, field="num_blocks", needed=needed, limit=cache.num_blocks)


def _trace(path: str, facts: Facts) -> StepTrace | None:
    return JsonlStepTrace(TraceFile(path), facts) if path else None


def _allocation(cache: CacheConfig) -> AllocationPolicy:
    return ReserveContext() if cache.kv_layout == "contiguous" else GrowOnDemand()


def _index(cache: CacheConfig, plan: KVPlan) -> PrefixIndex:
    return RadixIndex(plan) if cache.shares_prefixes else NoPrefixIndex()


def _policy(name: str, server: ServerConfig) -> Policy:
    """Return the policy, with fair shares if there are keys; a static batch takes all that wait."""
    policy = POLICIES[name]()
    return FairShare(policy) if server.api_keys_file and name != "static" else policy


def _quotas(server: ServerConfig) -> NoQuotas:
    """Return quotas over several front ends; a single one counts by itself."""
    return SharedQuotas() if server.api_keys_file and server.frontends > 1 else NO_QUOTAS
