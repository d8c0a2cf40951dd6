"""Makes the runner of a loaded decoder, and has it compute everything once that a request may meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from photon_grpc.compose.sizes import Sizes
from photon_grpc.compose.threads import available_cores
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.kv import KVPlan
from photon_grpc.errors import ConfigError
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.precompile import precompile_on_demand
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.build import eager_runner, graph_runner
from photon_grpc.runner.capacity import blocks_on_cpu, blocks_on_cuda, largest_step
from photon_grpc.runner.graphs import Capture
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.warm_up import call_once, one_layer_of_each_kind, warm_up, warm_up_mixed

#: stage, done, total.
OnStage = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The makings of a runner, for any decoder."""

    config: ServeConfig
    kernels: Kernels
    sizes: Sizes
    progress: OnStage

    def runner(self, decoder: Decoder) -> ModelRunner:
        """Raise ConfigError where memory does not suffice."""
        if decoder.device.type == "cpu":
            runner = self._runner(decoder, self._num_blocks_on_cpu(decoder))
            warm_up(runner)
            return runner
        short = one_layer_of_each_kind(decoder)
        with precompile_on_demand(lambda: self._dry_run(short), partial(self.progress, "kernels"), available_cores()):
            # The first kernel that is missing is met here, where nothing is measured.
            self._largest_step(short)
            runner = self._runner(decoder, self._num_blocks_on_cuda(decoder))
            self._warm(runner)
            return runner

    def _dry_run(self, short: Decoder) -> None:
        """Compute as `runner` does, on objects of its own."""
        self._largest_step(short)
        quiet = WarmStart(self.config, self.kernels, self.sizes, lambda stage, done, total: None)
        runner = quiet._runner(short, 1, call_once)
        try:
            quiet._warm(runner)
        finally:
            runner.close()

    def _warm(self, runner: ModelRunner) -> None:
        sizes = self.sizes
        warm_up(runner)
        warm_up_mixed(
            runner,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
        )

    def _runner(self, decoder: Decoder, num_blocks: int, capture: Capture | None = None) -> ModelRunner:
        cache, sizes = self._kv_cache(decoder, num_blocks), self.sizes
        if decoder.device.type == "cpu" or self.config.device.enforce_eager:
            return eager_runner(decoder, cache, self.kernels, max_num_seqs=sizes.max_num_seqs, depth=sizes.depth)
        return graph_runner(
            decoder,
            cache,
            self.kernels,
            max_num_seqs=sizes.max_num_seqs,
            depth=sizes.depth,
            progress=lambda done, total: self.progress("warm-up", done, total + 1),
            capture=capture,
        )

    def _plan(self, decoder: Decoder) -> KVPlan:
        return KVPlan(decoder.kv_groups, self.sizes.block_size)

    def _kv_cache(self, decoder: Decoder, num_blocks: int) -> KVCache:
        try:
            return KVCache(self._plan(decoder), num_blocks, decoder.device)
        except RuntimeError:  # torch's word for memory that is not there, whatever the device
            tokens = self.sizes.block_size
            message = f"{num_blocks} KV blocks of {tokens} tokens do not fit into memory; set a smaller --num-blocks"
            raise ConfigError(message, field="num_blocks", needed=num_blocks) from None

    def _num_blocks_on_cpu(self, decoder: Decoder) -> int:
        sizes = self.sizes
        return self.config.cache.num_blocks or blocks_on_cpu(
            self._plan(decoder), sizes.max_num_seqs, sizes.max_model_len
        )

    def _num_blocks_on_cuda(self, decoder: Decoder) -> int:
        return self.config.cache.num_blocks or blocks_on_cuda(
            decoder,
            self.kernels,
            self._plan(decoder),
            self.config.device.gpu_memory_utilization,
            self.sizes.max_num_seqs,
            self.sizes.max_num_batched_tokens,
        )

    def _largest_step(self, decoder: Decoder) -> None:
        sizes = self.sizes
        largest_step(decoder, self.kernels, self._plan(decoder), sizes.max_num_seqs, sizes.max_num_batched_tokens)
