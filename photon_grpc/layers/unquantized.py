"""Weights as they are: 16 or 32 bits, in rows. On a CPU they are packed after loading where that is supported."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
from torch.nn import functional as F

from photon_grpc.kernels.gluon import can_fuse
from photon_grpc.kernels.linear import tiles
from photon_grpc.kernels.linear.tiles import Problem, Tile
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.gemm import LIBRARY, TILED, End, Gemm
from photon_grpc.layers.leaf import Target
from photon_grpc.layers.linear import Linear, LinearMethod
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.prepacked import pack

#: Sizes of heads that a tile of the rotary epilogue divides.
ROTARY_HEAD_DIMS = (32, 64, 128)


class Unquantized(LinearMethod):
    """W [out_features, in_features], b [out_features] or None."""

    def create(self, linear: Linear, device: torch.device) -> None:
        linear.weight = torch.empty(linear.out_features, linear.in_features, dtype=linear.dtype, device=device)
        linear.bias = torch.empty(linear.out_features, dtype=linear.dtype, device=device) if linear.has_bias else None

    def targets(self, linear: Linear) -> Iterator[Target]:
        for name, rows in linear.slices():
            weight = linear.weight[rows]
            yield Target(name + ".weight", weight, part=linear.part(weight.shape))
            if linear.bias is not None:
                bias = linear.bias[rows]
                yield Target(name + ".bias", bias, part=linear.part(bias.shape))

    def after_load(self, linear: Linear) -> None:
        packed = pack(linear.weight, linear.bias)
        if packed is not None:
            linear.method = PackedUnquantized()
            linear.weight = packed  # drops the row-major weight

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def fold(self, linear: Linear, norm: RMSNorm) -> bool:
        linear.weight.mul_(norm.weight)
        norm.weight.fill_(1.0)
        return True

    def gemm(self, linear: Linear, num_rows: int, end: End) -> Gemm | None:
        tile = self.tile(linear, num_rows, end)
        if tile is not None:
            return partial(TILED[end.epilogue], linear, tile, end)
        # Of a residual stream that is not normalised yet the products may be large: float16 ends at 65,504.
        is_too_large = end.epilogue in ("rotary", "swiglu") and linear.dtype == torch.float16
        library = None if is_too_large else LIBRARY.get(end.epilogue)
        return library and partial(library, linear, end)

    def tile(self, linear: Linear, num_rows: int, end: End) -> Tile | None:
        """The kernel of ours that wins; None: the matrix library does, or none of ours can.

        A tile of normalised heads would have to hold a head whole.
        """
        if not num_rows or not can_fuse(linear.weight.device) or linear.dtype.itemsize != 2:
            return None
        if end.norms is not None or (end.epilogue == "rotary" and 2 * end.span not in ROTARY_HEAD_DIMS):
            return None
        may_share = end.epilogue not in ("logits", "draw")
        return _choose(linear.weight.device, Problem(*linear.weight.shape, num_rows, end.span), may_share)


class PackedUnquantized(Unquantized):
    """W packed for this CPU; what Unquantized becomes there. Nothing can be read from it or folded into it."""

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        return linear.weight(x)

    def fold(self, linear: Linear, norm: RMSNorm) -> bool:
        return False

    def gemm(self, linear: Linear, num_rows: int, end: End) -> Gemm | None:
        logits: Gemm = linear.weight.logits
        return logits if end.epilogue == "logits" else None


@cache
def _choose(device: torch.device, problem: Problem, may_share: bool) -> Tile | None:
    """Layers of one shape ask the same."""
    properties = torch.cuda.get_device_properties(device)
    max_bytes = tiles.pipeline_bytes(properties.shared_memory_per_block_optin)
    has_wgmma = properties.major == 9
    return tiles.choose(problem, has_wgmma=has_wgmma, may_share=may_share, max_bytes=max_bytes)
