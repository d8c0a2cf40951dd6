"""Operations on tensors: each file has the formula, a torch reference and a Triton kernel of the same signature.

    kernels = select("auto", device)      # once, when a model is built
    y = kernels.rms_norm(x, weight, eps)  # the choice is made once

Imports only torch (and NumPy); Triton where it is installed. Knows nothing of models, layers or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from photon_grpc.kernels import accept, admit, ngram, rms_norm, slot_state, swiglu
from photon_grpc.kernels.admit import SlotColumns, SlotRow
from photon_grpc.kernels.attention.dispatch import DependentChain, GroupAttention, dispatch, torch_backend
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.lang.jit import INTERPRETED, triton
from photon_grpc.kernels.rotary import rotary
from photon_grpc.kernels.sampling import (
    histogram,
    logprobs,
    penalties,
    process_logits,
    sample,
    sample_filtered,
)
from photon_grpc.kernels.sampling.logprobs import LogprobMetadata
from photon_grpc.kernels.sampling.process_logits import LogitsProcessing
from photon_grpc.kernels.sampling.sample import SamplingMetadata

KernelKind = Literal["auto", "torch", "triton"]


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operation; the signatures are those of each file's `reference`."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    #: The two with `once`.
    rms_norm_once: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm_once: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    swiglu: Callable[[torch.Tensor], torch.Tensor]
    geglu: Callable[[torch.Tensor], torch.Tensor]
    #: Whether a layer's experts are stacked, for the kernels of `moe/`; else each is computed on its own.
    stacks_experts: bool
    attention: Callable[..., GroupAttention]
    process_logits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LogitsProcessing], torch.Tensor]
    sample: Callable[[torch.Tensor, SamplingMetadata, LogitsProcessing | None], torch.Tensor]
    sample_filtered: Callable[
        [torch.Tensor, SamplingMetadata, histogram.Filters | None, torch.Tensor | None], torch.Tensor
    ]
    logprobs: Callable[[torch.Tensor, torch.Tensor, LogprobMetadata], torch.Tensor]
    decode_inputs: Callable[[torch.Tensor, torch.Tensor, slot_state.SlotState, int], slot_state.Inputs]
    mixed_inputs: Callable[..., slot_state.Inputs]
    count_sampled: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, penalties.Penalties], None]
    advance: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, slot_state.SlotState], None]
    accept: Callable[..., torch.Tensor]
    admit: Callable[[Sequence[SlotRow], SlotColumns], None]
    ngram: Callable[[torch.Tensor, torch.Tensor, slot_state.SlotState], None]


TORCH = Kernels(
    rms_norm=rms_norm.reference,
    add_rms_norm=rms_norm.add_reference,
    rms_norm_once=partial(rms_norm.reference, once=True),
    add_rms_norm_once=partial(rms_norm.add_reference, once=True),
    rotary=rotary.reference,
    swiglu=swiglu.reference,
    geglu=partial(swiglu.reference, activation="gelu"),
    stacks_experts=False,
    attention=torch_backend,
    process_logits=process_logits.reference,
    sample=sample.reference,
    sample_filtered=sample_filtered.reference,
    logprobs=logprobs.reference,
    decode_inputs=slot_state.decode_inputs_reference,
    mixed_inputs=slot_state.mixed_inputs_reference,
    count_sampled=penalties.count_reference,
    advance=slot_state.advance_reference,
    accept=accept.reference,
    admit=admit.reference,
    ngram=ngram.reference,
)

TRITON = Kernels(
    rms_norm=rms_norm.launch,
    add_rms_norm=rms_norm.add_launch,
    rms_norm_once=partial(rms_norm.launch, once=True),
    add_rms_norm_once=partial(rms_norm.add_launch, once=True),
    rotary=rotary.launch,
    swiglu=swiglu.launch,
    geglu=partial(swiglu.launch, activation="gelu"),
    stacks_experts=True,
    attention=dispatch,
    process_logits=process_logits.launch,
    sample=sample.launch,
    sample_filtered=sample_filtered.launch,
    logprobs=logprobs.launch,
    decode_inputs=slot_state.decode_inputs,
    mixed_inputs=slot_state.mixed_inputs,
    count_sampled=penalties.count,
    advance=slot_state.advance,
    accept=accept.launch,
    admit=admit.launch,
    ngram=ngram.launch,
)


def select(kind: KernelKind, device: torch.device | str) -> Kernels:
    """Return the operations for tensors on `device`: "auto" is Triton on CUDA where it is installed, else torch.

    Raise ValueError if "triton" is asked for and cannot run, and for an unknown kind.
    """
    on_device = torch.device(device).type == "cuda" or INTERPRETED
    runs = triton is not None and on_device
    if kind == "torch" or (kind == "auto" and not runs):
        return TORCH
    if kind not in ("auto", "triton"):
        raise ValueError(f"kernels {kind!r}: expected auto, torch or triton")
    if not runs:
        missing = "triton is not installed" if triton is None else "they need a CUDA device"
        raise ValueError(f"kernels 'triton' cannot run on {device}: {missing}")
    return TRITON


__all__ = ["AttentionMetadata", "DependentChain", "GroupAttention", "KernelKind", "Kernels", "select"]
