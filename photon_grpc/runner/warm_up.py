"""Steps before the first request, which pay the time and memory of first calls, and savings for a dry run of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from photon_grpc.config.sizes import Sizes
from photon_grpc.core.batch import DRAFT_COUNTS, MAX_VERIFY_TOKENS, Admission, Batch
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.logprobs import LogprobParams
from photon_grpc.core.request import SamplingParams
from photon_grpc.errors import ConfigError, NumericFailure
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.buckets import DECODE_BUCKETS, LONG_BUCKETS, VERIFY_ROWS
from photon_grpc.runner.build import eager_runner
from photon_grpc.runner.graphs import Replay, Tensors
from photon_grpc.runner.kernel_cache import damage
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner

_GREEDY, _FILTERED = SamplingParams(0.0), SamplingParams(1.0, top_p=0.9)
_PENALISED = SamplingParams(0.0, frequency_penalty=0.1)
#: Tokens of prompts that a drafter's kernels differ for: it computes them without a graph.
_DRAFTED_PROMPTS = (32, 33, 300, 512)


def warm_up(runner: ModelRunner) -> float:
    """Compute one token at each sampling level, the plain one last; return its seconds. Raise as `compute`."""
    plain = _row(runner.kv, 1, 1)
    processed = structs.replace(plain, min_tokens=1, banned_until_min=(0,))
    filtered = structs.replace(plain, sampling=_FILTERED)
    both = structs.replace(processed, sampling=_FILTERED)
    with_logprobs = [
        structs.replace(admission, logprobs=LogprobParams(num_logprobs=0)) for admission in (processed, plain)
    ]
    *_, seconds = [
        compute(runner, Batch(0, (1,), (1,), (1,), admissions=(admission,)))
        for admission in (*with_logprobs, both, processed, filtered, plain)
    ]
    return seconds


def warm_up_mixed(runner: ModelRunner, sizes: Sizes) -> None:
    """Compute prompts longer than any graph beside few and many decode rows. Raise as `compute`.

    Such steps run eagerly, and their kernels differ with the number of rows. Otherwise the first long prompt would wait
    until they are compiled or loaded.
    """
    num_tokens = LONG_BUCKETS[-1] + 1
    length = min(sizes.max_model_len - 1, num_tokens)
    num_prompts = -(-num_tokens // length)
    prompts = [_row(runner.kv, slot, length) for slot in range(1, num_prompts + 1)]
    for num_rows in (0, *DECODE_BUCKETS):
        num_slots = num_prompts + num_rows
        if num_slots > sizes.max_num_seqs or num_prompts * length + num_rows > sizes.max_num_batched_tokens:
            break
        decoding = [_row(runner.kv, slot, length, length - 1) for slot in range(num_prompts + 1, num_slots + 1)]
        slots, counts = tuple(range(1, num_slots + 1)), (length,) * num_prompts + (1,) * num_rows
        compute(runner, Batch(0, slots, counts, (1,) * num_slots, admissions=(*prompts, *decoding)))


def warm_up_drafts(runner: ModelRunner, sizes: Sizes) -> None:
    """Compute drafts of few and many rows, steps that verify them, and prompts for a drafter. Raise as `compute`."""
    most = runner.drafter.max_drafts
    if not most or sizes.max_model_len < most + 4:
        return
    for length in _DRAFTED_PROMPTS:
        if length <= min(sizes.max_model_len - 1, sizes.max_num_batched_tokens):
            compute(runner, Batch(0, (1,), (length,), (1,), admissions=(_row(runner.kv, 1, length),)))
    # Steps without a graph have the kernels of long prompts: the largest is enough.
    for sampling, buckets in ((_PENALISED, VERIFY_ROWS[:1]), (_GREEDY, (*VERIFY_ROWS, sizes.max_num_seqs))):
        # The most rows may lie between two buckets; the larger one is theirs.
        for num_rows in dict.fromkeys(min(each, sizes.max_num_seqs) for each in buckets):
            drafts = _most_captured(num_rows, most)
            if num_rows * (drafts + 1) > sizes.max_num_batched_tokens:
                break
            slots, counts = tuple(range(1, num_rows + 1)), (drafts + 1,) * num_rows
            prompts = tuple(_row(runner.kv, slot, 2, sampling=sampling) for slot in slots)
            compute(runner, Batch(0, slots, (2,) * num_rows, (1,) * num_rows, admissions=prompts))
            compute(runner, Batch(0, slots, counts, counts, drafts=drafts))


def _most_captured(num_rows: int, most: int) -> int:
    """Return the most drafts of so many rows that are verified by a graph; `most` where no step of theirs is."""
    numbers = [drafts for drafts in DRAFT_COUNTS if drafts <= most and num_rows * (drafts + 1) <= MAX_VERIFY_TOKENS]
    return max(numbers, default=most)


def largest_step(decoder: Decoder, plan: KVPlan, sizes: Sizes) -> None:
    """Compute the step with most tokens and rows, with filters and logprobs, on one block. Raise as `compute`."""
    num_tokens = sizes.max_num_batched_tokens
    length = min(decoder.max_model_len - 1, max(1, num_tokens // max(1, min(sizes.max_num_seqs, num_tokens))))
    num_rows = max(1, min(sizes.max_num_seqs, num_tokens // length))
    runner = eager_runner(decoder, KVCache(plan, 1, decoder.device), max_num_seqs=num_rows)
    slots = tuple(range(1, num_rows + 1))
    rows = [_row(plan, slot, length, sampling=_FILTERED) for slot in slots]
    admissions = tuple(structs.replace(row, logprobs=LogprobParams(num_logprobs=0)) for row in rows)
    compute(runner, Batch(0, slots, (length,) * num_rows, (1,) * num_rows, admissions=admissions))


def compute(runner: ModelRunner, batch: Batch) -> float:
    """Return a batch's seconds. Raise ConfigError if it fails, NumericFailure if its results are not finite."""
    output = runner.submit(batch).result()
    for fault in output.faults.values():
        step = f"a step of {len(batch.slots)} sequences and {sum(batch.counts)} tokens, computed before the start,"
        if fault.reason == NumericFailure.reason:
            raise NumericFailure(f"{step} gave NaN or infinite logits")
        cause = "the log above has the cause; for want of memory lower --max-num-batched-tokens or --max-num-seqs"
        # What is damaged need not be what this step wanted.
        notes = "; ".join([cause, *filter(None, [damage()])])
        raise ConfigError(f"{step} failed: {fault.message}; {notes}", field="max_num_batched_tokens")
    return output.duration_s


def _row(plan: KVPlan, slot: int, length: int, num_computed: int = 0, sampling: SamplingParams = _GREEDY) -> Admission:
    """Return an admission whose blocks are all block 1, which no request has yet."""
    blocks = ((1,) * plan.columns(length),) * len(plan.groups)
    return Admission(slot, (0,) * length, length, num_computed, blocks, sampling)


def call_once(function: Callable[[], Tensors], before: Callable[[], Any] | None = None) -> Replay[Tensors]:
    """Call the function instead of capturing it; its replay does nothing."""
    out = function()
    return lambda: None, out
