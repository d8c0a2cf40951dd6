"""The number of KV blocks."""

from __future__ import annotations

import torch

from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.request import SamplingParams
from photon_grpc.errors import ConfigError
from photon_grpc.kernels import Kernels
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.build import eager_runner
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.warm_up import compute

CPU_POOL_BYTES = 1 << 30


def blocks_on_cpu(plan: KVPlan, max_num_seqs: int, max_model_len: int) -> int:
    """Blocks of max_num_seqs full contexts, at most 1 GiB, at least one for each group."""
    wanted = max_num_seqs * plan.blocks(max_model_len)
    return max(len(plan.groups), min(wanted, CPU_POOL_BYTES // plan.block_bytes))


def blocks_on_cuda(
    decoder: Decoder,
    kernels: Kernels,
    plan: KVPlan,
    utilization: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    """Blocks in the rest of `utilization` of the device's memory behind weights and the largest step, measured by
    running one.

    Raise ConfigError when nothing is left.
    """
    torch.cuda.reset_peak_memory_stats(decoder.device)
    before = torch.cuda.memory_allocated(decoder.device)
    largest_step(decoder, kernels, plan, max_num_seqs, max_num_batched_tokens)
    torch.cuda.synchronize(decoder.device)
    step_bytes = torch.cuda.max_memory_allocated(decoder.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(decoder.device)
    budget = int(free - total * (1.0 - utilization)) - step_bytes
    if budget < (len(plan.groups) + 1) * plan.block_bytes:
        raise ConfigError(
            f"no memory is left for the KV cache: {free >> 20} MiB of {total >> 20} are free, "
            f"the largest step takes {step_bytes >> 20}; "
            "lower --max-num-batched-tokens or raise --gpu-memory-utilization",
            field="gpu_memory_utilization",
        )
    return budget // plan.block_bytes - 1


def largest_step(decoder: Decoder, kernels: Kernels, plan: KVPlan, max_num_seqs: int, num_tokens: int) -> None:
    """One step of `num_tokens` over as many rows as there may be, on a cache just large enough.

    Raise ConfigError when it cannot be computed.
    """
    length = min(decoder.max_model_len - 1, max(1, num_tokens // max(1, min(max_num_seqs, num_tokens))))
    num_rows = max(1, min(max_num_seqs, num_tokens // length))
    cache = KVCache(plan, plan.columns(length), decoder.device)
    runner = eager_runner(decoder, cache, kernels, max_num_seqs=num_rows)
    admissions = tuple(_row(slot, length, plan) for slot in range(1, num_rows + 1))
    slots = tuple(range(1, num_rows + 1))
    compute(runner, Batch(0, slots, (length,) * num_rows, (1,) * num_rows, admissions=admissions))


def _row(slot: int, length: int, plan: KVPlan) -> Admission:
    ids, table = (0,) * length, tuple(range(1, plan.columns(length) + 1))
    return Admission(slot, ids, length, 0, (table,) * len(plan.groups), SamplingParams(temperature=1.0, top_p=0.9))
