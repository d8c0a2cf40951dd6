"""Random packed weights, and the numbers that they stand for in float64."""

from __future__ import annotations

import torch

from photon_grpc.kernels.linear.decode import arrange
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind

#: Every way to pack: per channel and in groups, with zeros and a norm or without.
KINDS = [WeightKind(8, group, False, has_norm) for group in (0, 32, 64, 128) for has_norm in (False, True)]
KINDS += [
    WeightKind(4, group, *has) for group in (32, 64, 128) for has in ((False, False), (True, False), (True, True))
]


def packed_weight(
    n: int, k: int, kind: WeightKind, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", *, seed: int = 0
) -> QuantizedWeight:
    """Return a random weight in natural order, of four bits with scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (n, k * kind.BITS // 8), generator=generator, dtype=torch.uint8)
    values = values.view(torch.int8) if kind.BITS == 8 else values
    groups = k // kind.GROUP if kind.GROUP else 1
    scales = torch.rand((groups, n), generator=generator) * 0.02 / 2 ** (kind.BITS - 4)
    if kind.BITS == 4:
        # As weights have that are quantized at load.
        scales *= torch.randint(0, 2, scales.shape, generator=generator) * 2 - 1
    zeros = torch.randint(0, 17, (groups, n), generator=generator) if kind.HAS_ZEROS else None
    norm = torch.randn(k, generator=generator) if kind.HAS_NORM else None
    sides = [None if side is None else side.to(dtype).to(device) for side in (scales, zeros, norm)]
    return QuantizedWeight(values.to(device), *sides, kind)


def arranged(weight: QuantizedWeight) -> QuantizedWeight:
    return weight._replace(values=arrange(weight.values, weight.kind.BITS).contiguous(), is_arranged=True)


def numbers(weight: QuantizedWeight) -> torch.Tensor:
    """Return W in float64, each product rounded once to the dtype of the scales, value by value."""
    dtype, kind = weight.scales.dtype, weight.kind
    k = weight.shape[1]
    if kind.BITS == 8:
        q = weight.values.double()
    else:
        byte = weight.values.int().repeat_interleave(2, dim=1)
        q = torch.where(torch.arange(k, device=byte.device) % 2 == 0, byte % 16, byte // 16).double()
    group = torch.arange(k, device=q.device) // (kind.GROUP or k)
    zero = 8.0 * (kind.BITS == 4) if weight.zeros is None else weight.zeros.double().t()[:, group]
    w = ((q - zero) * weight.scales.double().t()[:, group]).to(dtype)
    return w.double() if weight.norm is None else (w.double() * weight.norm.double()).to(dtype).double()
