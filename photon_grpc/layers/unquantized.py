"""Unquantized weights of 16 or 32 bits, in rows. On a CPU they are packed after loading where that is supported."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
from torch.nn import functional as F

from photon_grpc.kernels.lang.gluon import can_fuse
from photon_grpc.kernels.linear import cost, cut, tiles
from photon_grpc.kernels.linear.cost import Device, Product
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.linear.weight import PLAIN, WeightKind
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.epilogues import Epilogue, Gemm, Logits
from photon_grpc.layers.linear import Folded, Linear, LinearMethod
from photon_grpc.layers.operands import DenseOperands
from photon_grpc.layers.parameter_owner import Target
from photon_grpc.layers.prepacked import pack


class Unquantized(LinearMethod):
    """A format with W [out_features, in_features] and b [out_features] or None."""

    def create(self, linear: Linear, device: torch.device) -> None:
        linear.weight = torch.empty(linear.out_features, linear.in_features, dtype=linear.dtype, device=device)
        linear.bias = torch.empty(linear.out_features, dtype=linear.dtype, device=device) if linear.has_bias else None

    def targets(self, linear: Linear) -> Iterator[Target]:
        for name, rows in linear.slices():
            weight = linear.weight[rows]
            yield Target(name + ".weight", weight, part=linear.part(name, weight.shape))
            if linear.bias is not None:
                bias = linear.bias[rows]
                yield Target(name + ".bias", bias, part=linear.part(name, bias.shape, columns=None))

    def after_load(self, linear: Linear) -> None:
        packed = pack(linear.weight, linear.bias)
        if packed is not None:
            linear.method = PackedUnquantized()
            linear.weight = packed  # drops the row-major weight

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def fold(self, linear: Linear) -> Folded:
        if linear.norm is None:
            return Folded.NO
        linear.weight.mul_(linear.norm.weight)
        linear.norm.weight.fill_(1.0)
        return Folded.INTO_WEIGHT

    def num_slices(self, linear: Linear) -> int:
        return cut.num_slices(linear.out_features, linear.in_features)

    def gemm(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Gemm | None:
        operands = DenseOperands(linear.weight, linear.bias, linear.num_slices)
        tile = self.tile(linear, num_rows, epilogue)
        if tile is not None:
            return partial(epilogue.tiled, operands, tile)
        return partial(epilogue.library, operands) if epilogue.library_takes(linear.dtype) else None

    def tile(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Tile | None:
        """Return the fastest kernel of ours; None if the matrix library is faster or none of ours can multiply it."""
        return tile_of(linear, num_rows, epilogue, linear.weight.device)


def tile_of(
    linear: Linear, num_rows: int, epilogue: Epilogue, device: torch.device, kind: WeightKind = PLAIN
) -> Tile | None:
    """Return the fastest kernel for 16-bit activations and a weight of this kind; None as `Unquantized.tile`."""
    if not num_rows or not can_fuse(device) or linear.dtype.itemsize != 2:
        return None
    return _choose(device, product_of(linear, num_rows, epilogue, kind), epilogue.library_takes(linear.dtype))


def product_of(linear: Linear, num_rows: int, epilogue: Epilogue, kind: WeightKind = PLAIN) -> Product:
    """Return the product as the cost model has it."""
    rows, columns = linear.weight.shape
    return Product(rows, columns, num_rows, epilogue.span, epilogue.cost, linear.num_slices, kind)


class PackedUnquantized(Unquantized):
    """A format with W packed for this CPU, which cannot be read back; Unquantized becomes this after loading."""

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        return linear.weight(x)

    def fold(self, linear: Linear) -> Folded:
        return Folded.NO

    def gemm(self, linear: Linear, num_rows: int, epilogue: Epilogue) -> Gemm | None:
        logits: Gemm = linear.weight.logits
        return logits if isinstance(epilogue, Logits) else None


@cache
def _choose(device: torch.device, product: Product, may_decline: bool) -> Tile | None:
    """Choose once for layers of the same shape."""
    properties = torch.cuda.get_device_properties(device)
    limits = Device(
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        tiles.pipeline_bytes(properties.shared_memory_per_block_optin),
        has_wgmma=properties.major == 9,
    )
    return cost.choose(product, limits, may_decline=may_decline)
