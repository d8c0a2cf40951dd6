"""The start of a runner: how many KV blocks there are, and everything computed once that a request may meet.

    runner = RunnerStart(limits, progress, num_compilers).runner(decoder)

On CUDA the largest step is computed, and the memory that it leaves is the KV cache (`runner`); graphs are captured
(`graphs.py`); steps without a graph are computed (`warm_up.py`). The first kernel that is not in Triton's cache
interrupts this for a dry run, which does the same on separate objects and finds every missing kernel; they are compiled
side by side (`kernels/lang/precompile.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from photon_grpc.config.sizes import Sizes
from photon_grpc.core.kv import KVPlan, attached
from photon_grpc.errors import ConfigError
from photon_grpc.kernels import TORCH
from photon_grpc.kernels.lang.precompile import precompile_on_demand
from photon_grpc.models.decoder import Decoder
from photon_grpc.models.short import one_layer_of_each_kind
from photon_grpc.runner.build import eager_runner, graph_runner
from photon_grpc.runner.drafting import NO_SPECULATION, Speculation
from photon_grpc.runner.graphs import Capture, CaptureOrRefuse, CudaCapture
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.ranks import ALONE, Ranks
from photon_grpc.runner.warm_up import (
    call_once,
    largest_step,
    warm_up,
    warm_up_drafts,
    warm_up_mixed,
)

CPU_POOL_BYTES = 1 << 30

#: Called with (stage, done, total).
OnStage = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Limits on the device memory of a runner and on the length of its steps."""

    sizes: Sizes
    #: None: as many as fit into memory.
    num_blocks: int | None = None
    #: Share of a CUDA device's memory for weights, activations and KV cache.
    gpu_memory_utilization: float = 0.9
    #: Whether steps may be replayed from CUDA graphs.
    may_capture: bool = True


@dataclass(frozen=True, slots=True)
class RunnerStart:
    """The start of a runner for any decoder.

    Args:
        progress: called in the stages "warm-up" (steps) and "kernels" (those that must be compiled).
        num_compilers: kernels compiled at a time.
        speculation: how the runner drafts.
        ranks: those that compute the model together; all start alike.
    """

    limits: RunnerLimits
    progress: OnStage
    num_compilers: int
    speculation: Speculation = NO_SPECULATION
    ranks: Ranks = ALONE

    def runner(self, decoder: Decoder) -> ModelRunner:
        """Build the runner; raise ConfigError if memory does not suffice, NumericFailure if the model yields NaN."""
        num_blocks = self.limits.num_blocks
        if decoder.device.type == "cpu":
            num_blocks = self.ranks.minimum(num_blocks or self._blocks_on_cpu(decoder))
            self.ranks.join(decoder.device, decoder.embedding.weight.shape[1])
            return self._warm_runner(decoder, num_blocks)
        short = one_layer_of_each_kind(decoder)
        progress = partial(self.progress, "kernels")
        with precompile_on_demand(lambda: self._dry_run(short), progress, self.num_compilers):
            # The first missing kernel is compiled here, where nothing is measured.
            with self.ranks.leader_first():
                self._largest_step(short)
            # All are about to join.
            self.ranks.minimum(0)
            self.ranks.join(decoder.device, decoder.embedding.weight.shape[1])
            num_blocks = self.ranks.minimum(num_blocks or self._blocks_on_cuda(decoder))
            # What was used while the weights were loaded.
            torch.cuda.empty_cache()
            return self._warm_runner(decoder, num_blocks)

    def _dry_run(self, short: Decoder) -> None:
        """Compute as `runner` does, on separate objects, and wait for the device."""
        quiet = replace(self, progress=lambda stage, done, total: None)
        with self.ranks.alone():
            self._largest_step(short)
            quiet._warm_runner(short, 1, call_once).close()

    def _warm_runner(self, decoder: Decoder, num_blocks: int, capture: Capture | None = None) -> ModelRunner:
        runner = self._runner(decoder, num_blocks, capture)
        warm_up(runner)
        if decoder.device.type == "cuda":
            warm_up_mixed(runner, self.limits.sizes)
            warm_up_drafts(runner, self.limits.sizes)
        return runner

    def _runner(self, decoder: Decoder, num_blocks: int, capture: Capture | None) -> ModelRunner:
        cache, sizes = self._kv_cache(decoder, num_blocks), self.limits.sizes
        if not self._is_captured(decoder):
            return eager_runner(
                decoder, cache, max_num_seqs=sizes.max_num_seqs, depth=sizes.depth, speculation=self.speculation
            )
        return graph_runner(
            decoder,
            cache,
            max_num_seqs=sizes.max_num_seqs,
            depth=sizes.depth,
            progress=lambda done, total: self.progress("warm-up", done, total + 1),
            capture=capture or self._capture(),
            speculation=self.speculation,
        )

    def _capture(self) -> Capture | None:
        """Return what captures on several ranks; None for one, which may go on without a graph."""
        return None if self.ranks.mesh.world.size == 1 else CaptureOrRefuse(CudaCapture())

    def _is_captured(self, decoder: Decoder) -> bool:
        """Return whether steps are captured; torch's attention reads lengths from the device, which forbids it."""
        return decoder.device.type == "cuda" and self.limits.may_capture and decoder.kernels is not TORCH

    def _kv_cache(self, decoder: Decoder, num_blocks: int) -> KVCache:
        try:
            return KVCache(self._plan(decoder), num_blocks, decoder.device)
        except RuntimeError:  # torch's out-of-memory error on any device
            tokens = self.limits.sizes.block_size
            message = f"{num_blocks} KV blocks of {tokens} tokens do not fit into memory; set a smaller --num-blocks"
            raise ConfigError(message, field="num_blocks", needed=num_blocks) from None

    def _plan(self, decoder: Decoder) -> KVPlan:
        return KVPlan(
            attached(decoder.kv_groups, self.speculation.kv_groups),
            self.limits.sizes.block_size,
            self.limits.sizes.max_chunk,
        )

    def _largest_step(self, decoder: Decoder) -> None:
        largest_step(decoder, self._plan(decoder), self.limits.sizes)

    def _blocks_on_cpu(self, decoder: Decoder) -> int:
        """Return the blocks of max_num_seqs full contexts, at most 1 GiB, at least one for each group."""
        plan, sizes = self._plan(decoder), self.limits.sizes
        wanted = sizes.max_num_seqs * plan.blocks(sizes.max_model_len)
        return max(len(plan.groups), min(wanted, CPU_POOL_BYTES // plan.block_bytes))

    def _blocks_on_cuda(self, decoder: Decoder) -> int:
        """Return the blocks in --gpu-memory-utilization beside weights, lanes and the largest step, which is run here.

        Raise ConfigError when nothing is left.
        """
        plan, device, sizes = self._plan(decoder), decoder.device, self.limits.sizes
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self._largest_step(decoder)
        torch.cuda.synchronize(device)
        step_bytes = torch.cuda.max_memory_allocated(device) - before
        if decoder.kernels is not TORCH:
            # Of contexts of any length, which the largest step has not met.
            most, longest = sizes.max_num_seqs * (1 + self.speculation.max_drafts), sizes.max_model_len
            step_bytes += max(layer.attention.lane_bytes(most, longest) for layer in decoder.layers)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - total * (1.0 - self.limits.gpu_memory_utilization)) - step_bytes
        if budget < (len(plan.groups) + 1) * plan.block_bytes:
            raise ConfigError(
                f"no memory is left for the KV cache: {free >> 20} MiB of {total >> 20} are free, "
                f"the largest step takes {step_bytes >> 20}; lower --max-num-batched-tokens, --max-num-seqs or "
                "--max-model-len, or raise --gpu-memory-utilization",
                field="gpu_memory_utilization",
            )
        return budget // plan.block_bytes - 1
