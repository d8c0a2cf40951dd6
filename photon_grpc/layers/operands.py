"""A weight and a bias as products take them: by kernels of ours and by the matrix library, with the same bits."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from photon_grpc.kernels import swiglu
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import (
    dequantize,
    epilogue,
    fused8,
    fused_linear,
    many_rows,
    products8,
    slices,
    weight,
    wide,
    wide16,
    wide16_tiles,
)
from photon_grpc.kernels.linear.fused8 import Linear8
from photon_grpc.kernels.linear.fused_linear import Affine, Fusion, Gate, gated_fusion, heads_fusion
from photon_grpc.kernels.linear.products8 import Weight8
from photon_grpc.kernels.linear.weight import QuantizedWeight
from photon_grpc.kernels.linear.wide8 import holds_pairs
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from photon_grpc.kernels.swiglu import Activation


class Operands(Protocol):
    """The map x -> W x + b.

    launchers: the file with the kernels that multiply and end a product: qkv_launch, swiglu_launch, add_launch,
        sums_launch.
    """

    launchers: Any

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def map(self) -> Any:
        """The map as `launchers` take it."""

    def qkv(self, h: torch.Tensor, eps: float, out: HeadOutput) -> None:
        """Fill out.q and change out.cache as `qkv_launch` does."""

    def swiglu(self, h: torch.Tensor, eps: float, y: torch.Tensor, activation: Activation = "silu") -> None:
        """Fill y as `swiglu_launch` does."""

    def add_to(self, h: torch.Tensor, x: torch.Tensor) -> None:
        """Change h as `add_launch` does."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ [T, N], in bf16 rounded as `sums_launch` does, or the float32 sums [slices, T, N] of K's slices.

        Sums of slices are for a kernel that adds them in order and rounds once.
        """

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ in float32, not rounded first."""

    def for_pieces(self, x: torch.Tensor) -> Operands:
        """Return operands for products of x's rows in pieces: what each piece would do again is done."""


class _Products:
    """Epilogues as a second kernel, after one that computes only the product."""

    bias: torch.Tensor | None

    def qkv(self, h: torch.Tensor, eps: float, out: HeadOutput) -> None:
        rotate_store.launch(self.product(h), h, self.bias, eps, out)

    def swiglu(self, h: torch.Tensor, eps: float, y: torch.Tensor, activation: Activation = "silu") -> None:
        product = self.product(h)
        if product.dim() == 3:
            product = functools.reduce(torch.add, product).to(h.dtype)
        swiglu.norm_launch(product, h, self.bias, eps, y, activation)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ [T, N] in x's dtype, or the float32 sums [slices, T, N] of several slices of K."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class DenseOperands(_Products):
    """W [N, K] in the dtype of x; the sum over K is cut into `num_slices` (kernels/linear/cut.py)."""

    launchers: ClassVar[Any] = fused_linear

    weight: torch.Tensor
    bias: torch.Tensor | None
    num_slices: int

    @property
    def map(self) -> Affine:
        return Affine(self.weight, self.bias, self.num_slices)

    def swiglu(self, h: torch.Tensor, eps: float, y: torch.Tensor, activation: Activation = "silu") -> None:
        if not wide16.knows(h, self.map):
            return _Products.swiglu(self, h, eps, y, activation)
        fusion = gated_fusion(Gate(eps, activation), self.weight.shape[0] // 2)
        if wide16_tiles.tile_of(h.shape[0], *self.weight.shape) is None:
            wide16.preload(fusion, h, self.map, y, torch.empty(1, dtype=torch.float32, device=h.device))
            return _Products.swiglu(self, h, eps, y, activation)
        return wide16.launch(fusion, h, self.map, y, squares.norms(h, eps))

    def add_to(self, h: torch.Tensor, x: torch.Tensor) -> None:
        tile = many_rows.choose(x, self.weight, self.num_slices)
        if tile is not None:
            return many_rows.add(h, x, self.weight, self.bias, self.num_slices, tile)
        if self.num_slices > 1:
            return slices.add_launch(h, slices.products(x, self.weight, self.num_slices), self.bias)
        if self.bias is not None:
            h.add_(self.bias)
        h.addmm_(x, self.weight.t())
        return None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_slices > 1:
            return functools.reduce(torch.add, slices.products(x, self.weight, self.num_slices))
        if x.is_cuda and x.dtype != torch.float32:
            # The sums are float32 in the multiplier: they are not rounded on the way out.
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return F.linear(x, self.weight).float()

    def for_pieces(self, x: torch.Tensor) -> Operands:
        return self

    def product(self, x: torch.Tensor) -> torch.Tensor:
        tile = many_rows.choose(x, self.weight, self.num_slices)
        if tile is not None and x.dtype == torch.bfloat16:
            return many_rows.product(x, self.weight, self.num_slices, tile)
        if self.num_slices > 1:
            return slices.products(x, self.weight, self.num_slices)
        return x @ self.weight.t()


@dataclass(frozen=True, slots=True, eq=False)
class PackedOperands(_Products):
    """W in 8 or 4 bits, multiplied in the dtype of x: by `wide.py`, or by the library, from a scratch of all of W."""

    launchers: ClassVar[Any] = fused_linear

    weight: QuantizedWeight
    bias: torch.Tensor | None
    num_slices: int

    @property
    def map(self) -> Affine:
        return Affine(self.weight, self.bias, self.num_slices)

    def dense(self) -> DenseOperands:
        scales = self.weight.scales
        if not self.weight.is_arranged:
            return DenseOperands(weight.dequantize(self.weight, scales.dtype), self.bias, self.num_slices)
        scratch = torch.empty(self.weight.shape, dtype=scales.dtype, device=scales.device)
        dequantize.launch(self.weight, scratch)
        return DenseOperands(scratch, self.bias, self.num_slices)

    def qkv(self, h: torch.Tensor, eps: float, out: HeadOutput) -> None:
        tile = self._fused_tile(h, out.cache.shape[-1] // 2)
        if tile is None or out.is_behind:
            return _Products.qkv(self, h, eps, out)
        return wide.launch(heads_fusion(out, eps), h, self.map, out.q, tile, squares.norms(h, eps))

    def swiglu(self, h: torch.Tensor, eps: float, y: torch.Tensor, activation: Activation = "silu") -> None:
        span = self.weight.shape[0] // 2
        tile = self._fused_tile(h, span)
        if tile is None:
            return _Products.swiglu(self, h, eps, y, activation)
        return wide.launch(gated_fusion(Gate(eps, activation), span), h, self.map, y, tile, squares.norms(h, eps))

    def add_to(self, h: torch.Tensor, x: torch.Tensor) -> None:
        tile = wide.choose(x, self.map)
        if tile is None:
            return self.dense().add_to(h, x)
        if tile.IS_SPLIT or h.dtype != torch.bfloat16:
            return slices.add_launch(h, wide.sums(x, self.map, tile), self.bias)
        fusion = Fusion(epilogue.load_residual, epilogue.add_residual, (self.bias, None))
        return wide.launch(fusion, x, self.map, h, tile)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        tile = wide.choose(x, self.map)
        if tile is None:
            return self.dense().logits(x)
        return functools.reduce(torch.add, wide.sums(x, self.map, tile))

    def for_pieces(self, x: torch.Tensor) -> Operands:
        return self.dense() if wide.choose(x, self.map) is None else self

    def _fused_tile(self, h: torch.Tensor, span: int) -> wide.WideTile | None:
        """Return the tile that ends a product of pairs `span` apart; None if another kernel does."""
        tile = wide.choose(h, self.map)
        fuses = tile is not None and not tile.IS_SPLIT and holds_pairs(span) and h.dtype == torch.bfloat16
        return tile if fuses else None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        tile = wide.choose(x, self.map)
        if tile is None:
            return self.dense().product(x)
        if self.num_slices > 1 and (tile.IS_SPLIT or x.dtype != torch.bfloat16):
            return wide.sums(x, self.map, tile)
        y = torch.empty((x.shape[0], self.weight.shape[0]), dtype=x.dtype, device=x.device)
        wide.launch(wide.PLAIN, x, self.map, y, tile)
        return y


class EightBitOperands(NamedTuple):
    """W in 8 bits, multiplied by x in 8 bits (kernels/linear/products8.py)."""

    weight: Weight8
    bias: torch.Tensor | None

    launchers = fused8

    @property
    def map(self) -> Linear8:
        return Linear8(self.weight, self.bias)

    def qkv(self, h: torch.Tensor, eps: float, out: HeadOutput) -> None:
        fused8.qkv_apart(h, self.map, eps, out)

    def swiglu(self, h: torch.Tensor, eps: float, y: torch.Tensor, activation: Activation = "silu") -> None:
        fused8.swiglu_apart(h, self.map, eps, y, activation)

    def add_to(self, h: torch.Tensor, x: torch.Tensor) -> None:
        fused8.add_apart(h, x, self.map)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return products8.product(x, self.weight, fused8.sums_dtype(x.dtype))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return products8.product(x, self.weight, torch.float32)

    def for_pieces(self, x: torch.Tensor) -> Operands:
        return self
