"""Epilogues of a product: the operations fused with it, including the norm before it.

    Rotary:       q, pages <- rotated (r · W h + b)      r = 1 / sqrt(mean(h²) + eps), the norm of the residual stream
    Latents:      absorbed q, pages <- rotated (r · W h), latents normalised
    SwiGLU:       y <- silu(g) · u,  (g, u) = r · W h + b
    GeGLU:        the same with gelu
    AddResidual:  h <- W x + (h + b)
    AddNormed:    h <- norm(W x + b) + h
    Logits:       W x in float32
    Plain:        W x
    PartialSums:  W x in float32, to be added to those of other ranks, in pieces of rows
    Sample:       an id from the logits

`tiled` is a kernel of ours that does all of it. `library` is the matrix library, which reads the residual stream before
its norm and adds to it, followed by a kernel that applies the norm. Both give the same bits: K is cut as the weight's
format says, sums are rounded in the same places. `EPILOGUES` in `kernels/linear/cost.py` has their costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from photon_grpc.kernels import norm_add
from photon_grpc.kernels.attention import latent_queries
from photon_grpc.kernels.attention.latent_queries import LatentOutput
from photon_grpc.kernels.lang.page_scales import PageScales
from photon_grpc.kernels.linear import head, tiles
from photon_grpc.kernels.linear.fused_linear import Gate, ResidualStream
from photon_grpc.kernels.norm_add import Norm
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Norms
from photon_grpc.kernels.sampling.sample import SamplingMetadata
from photon_grpc.kernels.swiglu import Activation
from photon_grpc.layers.operands import Operands
from photon_grpc.layers.workspace import Workspace

#: A product with its epilogue; its arguments are those of the epilogue's methods after the weight and the tile.
Gemm = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A rank's part of a sum over ranks, float32; `of` makes that of some rows, and is called for pieces of all."""

    of: Callable[[slice], torch.Tensor]

    @property
    def whole(self) -> torch.Tensor:
        return self.of(slice(None))


#: Pieces of h whose sum over ranks is on its way, and what waits for it.
Pending = list[tuple[slice, Callable[[], None]]]


class Epilogue(Protocol):
    """The epilogue of a product."""

    @property
    def cost(self) -> str:
        """The key in EPILOGUES of the cost model."""

    @property
    def span(self) -> int:
        """The distance of the rows of W that belong together; 0: none do."""

    def tiled(self, linear: Operands, tile: Any, *args: Any) -> Any:
        """Multiply by a kernel of ours."""

    def library(self, linear: Operands, *args: Any) -> Any:
        """Multiply by the matrix library."""

    def library_takes(self, dtype: torch.dtype) -> bool:
        """Return whether there is `library` for weights of this dtype."""


class _AnyDtype:
    def library_takes(self, dtype: torch.dtype) -> bool:
        return True


class _WideRange:
    """An epilogue whose library product may be that of the residual stream before its norm: too large for float16."""

    def library_takes(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float16


def bucket(num_rows: int) -> int:
    """Return the smallest of tiles.BUCKETS that holds num_rows; 0 above them all, and for no rows."""
    return (tiles.bucket(num_rows) or 0) if num_rows else 0


@dataclass(frozen=True, slots=True, eq=False)
class Rotary(_WideRange):
    """Queries, and keys and values in their pages.

    span: half a head. eps: that of the norm before the product, whose weight is folded into W. norms: weights [D] of
    the norms of query and of key heads, with the same eps; None: there are none. scales: the constants of pages of 8
    bits. is_whole: whether all numbers of a head are rotated.
    """

    span: int
    eps: float
    norms: Norms | None = None
    scales: PageScales | None = None
    is_whole: bool = True

    @property
    def cost(self) -> str:
        return "rotary" if self.norms is None and self.is_whole else "normed"

    def tiled(self, linear: Operands, tile: Any, work: Workspace, pages: torch.Tensor, layer: int) -> None:
        """Fill work.q, and `layer` of pages [num_blocks, layers, 2, Hkv, block_size, D]."""
        out = self._output(work, pages, layer)
        linear.launchers.qkv_launch(work.stream(), linear.map, self.eps, out, tile, work.counters)

    def library(self, linear: Operands, work: Workspace, pages: torch.Tensor, layer: int) -> None:
        linear.qkv(work.h, self.eps, self._output(work, pages, layer))

    def _output(self, work: Workspace, pages: torch.Tensor, layer: int) -> HeadOutput:
        return HeadOutput(work.q, pages, layer, work.rotation, self.norms, self.scales)


@dataclass(frozen=True, slots=True, eq=False)
class Latents(_WideRange):
    """Absorbed queries, and latents in their pages.

    eps: as of Rotary. norm: of latents. weight: what expands them; plain: the numbers of a query that are not rotated.
    """

    cost: ClassVar[str] = "normed"
    span: ClassVar[int] = 0
    eps: float
    norm: tuple[torch.Tensor, float]
    weight: torch.Tensor
    plain: int

    def tiled(self, linear: Operands, tile: Any, work: Workspace, pages: torch.Tensor, layer: int) -> None:
        """Fill work.q, and `layer` of pages [num_blocks, layers, 1, 1, block_size, R + P]."""
        sums = linear.launchers.sums_launch(work.h, linear.map, tile, work.counters)
        self._store(sums, work, pages, layer)

    def library(self, linear: Operands, work: Workspace, pages: torch.Tensor, layer: int) -> None:
        self._store(linear.product(work.h), work, pages, layer)

    def _store(self, sums: torch.Tensor, work: Workspace, pages: torch.Tensor, layer: int) -> None:
        h, partial = work.stream()
        out = LatentOutput(work.q, pages, layer, work.rotation, self.norm, self.weight, self.plain)
        latent_queries.launch(sums, h, partial, self.eps, out)


@dataclass(frozen=True, slots=True, eq=False)
class SwiGLU(_WideRange):
    """The input of the down projection. span: gate to up. eps: that of the norm before, as for Rotary."""

    cost: ClassVar[str] = "swiglu"
    activation: ClassVar[Activation] = "silu"
    span: int
    eps: float

    def tiled(self, linear: Operands, tile: Any, work: Workspace) -> None:
        """Fill work.y."""
        linear.launchers.swiglu_launch(
            work.stream(), linear.map, Gate(self.eps, self.activation), work.y, tile, work.counters
        )

    def library(self, linear: Operands, work: Workspace) -> None:
        many = linear.for_pieces(work.h)
        for rows in work.pieces():
            many.swiglu(work.h[rows], self.eps, work.y[rows], self.activation)


class GeGLU(SwiGLU):
    """The input of the down projection, with the tanh form of gelu."""

    activation: ClassVar[Activation] = "gelu"


class AddResidual(_AnyDtype):
    """The residual stream."""

    cost, span = "add", 0

    def tiled(self, linear: Operands, tile: Any, work: Workspace, x: torch.Tensor) -> None:
        """Change work.h."""
        stream = ResidualStream(work.h, work.written())
        linear.launchers.add_launch(stream, x, linear.map, tile, work.counters)

    def library(self, linear: Operands, work: Workspace, x: torch.Tensor) -> None:
        work.outdated()
        linear.add_to(work.h, x)


@dataclass(frozen=True, slots=True, eq=False)
class AddNormed(_WideRange):
    """The residual stream where a norm stands behind the product, which one kernel applies behind either product."""

    cost: ClassVar[str] = "add"
    span: ClassVar[int] = 0
    norm: Norm

    def tiled(self, linear: Operands, tile: Any, work: Workspace, x: torch.Tensor) -> None:
        """Change work.h."""
        self._add(linear.launchers.sums_launch(x, linear.map, tile, work.counters), linear, work)

    def library(self, linear: Operands, work: Workspace, x: torch.Tensor) -> None:
        self._add(linear.product(x), linear, work)

    def _add(self, product: torch.Tensor, linear: Operands, work: Workspace) -> None:
        norm_add.launch(product, linear.bias, self.norm, work.h, work.written())


class Logits(_AnyDtype):
    """Logits, float32 [R, vocab_size], of x [R, hidden_size]."""

    cost, span = "head", 0

    def tiled(self, linear: Operands, tile: Any, x: torch.Tensor) -> torch.Tensor:
        return head.logits_launch(x, linear.map, tile)

    def library(self, linear: Operands, x: torch.Tensor) -> torch.Tensor:
        return linear.logits(x)


class PartialSums(_AnyDtype):
    """Sums of some rows, float32 [rows, N], without bias, made when they are asked for: a rank's part of a sum."""

    cost, span = "head", 0

    def tiled(self, linear: Operands, tile: Any, work: Workspace, x: torch.Tensor) -> Parts:
        return Parts(lambda rows: head.logits_launch(x[rows], linear.map, tile, work.counters))

    def library(self, linear: Operands, work: Workspace, x: torch.Tensor) -> Parts:
        many = linear.for_pieces(x)
        return Parts(lambda rows: many.logits(x[rows]))


class Plain(_AnyDtype):
    """The product in x's dtype, without bias; of `work` only the counters are used."""

    cost, span = "head", 0

    def tiled(self, linear: Operands, tile: Any, work: Workspace, x: torch.Tensor) -> torch.Tensor:
        return head.logits_launch(x, linear.map, tile, work.counters).to(x.dtype)

    def library(self, linear: Operands, work: Workspace, x: torch.Tensor) -> torch.Tensor:
        product = linear.product(x)
        return (functools.reduce(torch.add, product) if product.dim() == 3 else product).to(x.dtype)


class Sample:
    """An id for each row of x, int64 [R], as `kernels/sampling/sample.py` does; logits are never written.

    It has the tile of the logits: filters see those that sampling without filters saw.
    """

    cost, span = "head", 0

    def tiled(self, linear: Operands, tile: Any, x: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        return head.sample_launch(x, linear.map, metadata, tile)

    def library(self, linear: Operands, *args: Any) -> torch.Tensor:
        raise NotImplementedError

    def library_takes(self, dtype: torch.dtype) -> bool:
        return False
