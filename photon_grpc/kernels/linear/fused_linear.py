"""The projections of a decode step, fused with the operations around them.

They are for few rows x and a W that must be streamed from memory.

    add_linear:     h += W a
    norm_swiglu:    y = act(g) · u,  (g, u) = r · W h + b,  r = 1 / sqrt(mean(h²) + eps)
    norm_qkv:       (q, k, v) = r · W h + b;  q and k normalised where the family does, and rotated by their positions;
                    k and v go to their pages

The weight of the norm before a projection is folded into the columns of W. The sums of h² are made by the kernel that
wrote h (`squares.py`). In bf16 the product is rounded as the matrix library rounds it, so that both give the same bits:

    h = round(round(W a) + round(h + b));   y = end(r · round(W h) + b)

One kernel multiplies, that of the Tile's kind; a Fusion has the operations before and after the product. If a tile does
not divide the heads, or heads are normalised, a second kernel, `rotate_store.py`, is the end of norm_qkv: tiles that
hold a whole head were slower than the two.

Shapes: h [M, H], partial [M, H / 16] and a [M, K], contiguous and with memory for `tiles.bucket(M)` rows from their
first element on (the surplus is read and does not matter), W [N, K], b [N] or None. W of norm_swiglu is gate above up;
W of norm_qkv the heads of q, k and v, their rotary halves as `rotary.py` has them. cos, sin [max_position, D/2]
float32, positions and slot_mapping [M] int64, cache [num_blocks, layers, 2, Hkv, block_size, D], q [M, Hq · D], y
[M, N/2]. bf16 and fp16. Bytes moved: N · K · itemsize, all else is small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels import swiglu
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.gluon import has_dependent_launch
from photon_grpc.kernels.lang.jit import launches
from photon_grpc.kernels.linear import epilogue, wide16
from photon_grpc.kernels.linear.gemv import gemv_kernel
from photon_grpc.kernels.linear.sides import WeightOperand
from photon_grpc.kernels.linear.tiles import HeadSplit, Problem, Tile, bucket, holds_heads
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind, dequantize
from photon_grpc.kernels.linear.wgmma import wgmma_kernel
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from photon_grpc.kernels.swiglu import Activation


class Affine(NamedTuple):
    """The map x -> W x + b; W [N, K], b [N] or None. The sum over K is cut into `slices` (cut.py)."""

    w: torch.Tensor | QuantizedWeight
    b: torch.Tensor | None = None
    slices: int = 1

    @property
    def kind(self) -> WeightKind:
        return self.w.kind if isinstance(self.w, QuantizedWeight) else WeightKind()

    @property
    def launches(self) -> bool:
        """Return whether a kernel multiplies."""
        return launches(self.w.values if isinstance(self.w, QuantizedWeight) else self.w)

    @property
    def operand(self) -> WeightOperand:
        """Return W as kernels take it. Raise ValueError if its columns are not arranged."""
        w = self.w
        if not isinstance(w, QuantizedWeight):
            return WeightOperand(w)
        if not w.is_arranged:
            raise ValueError("the packed weight is in natural order, kernels need it arranged: call decode.arrange")
        return WeightOperand(w.values, w.scales, w.zeros, w.norm)

    @property
    def matrix(self) -> torch.Tensor:
        """Return W in float32: [N, K]."""
        w = self.w
        return (dequantize(w, w.scales.dtype) if isinstance(w, QuantizedWeight) else w).float()


class Fusion(NamedTuple):
    """Operations joined with a product: a pair of `epilogue.py` with its operands, and the norm before it or None.

    span, heads, guard: as of a Problem.
    """

    load: Any
    store: Any
    operands: tuple[Any, ...] | None = None
    eps: float | None = None
    span: int = 0
    guard: bool = False
    heads: HeadSplit | None = None


class Gate(NamedTuple):
    """The eps of the norm before gate and up, and what the gate goes through."""

    eps: float
    activation: Activation = "silu"


class ResidualStream(NamedTuple):
    """The residual stream h [M, H] and the sums of its squares, partial [M, H / 16] (squares.py)."""

    h: torch.Tensor
    partial: torch.Tensor


def add_reference(stream: ResidualStream, a: torch.Tensor, linear: Affine) -> None:
    """Add in torch: changes the stream."""
    h, partial = stream
    if linear.b is not None:
        h.add_(linear.b)
    h.add_((a.float() @ linear.matrix.T).to(h.dtype))
    partial.copy_(squares.reference(h))


def swiglu_reference(
    h: torch.Tensor, linear: Affine, eps: float, y: torch.Tensor, activation: Activation = "silu"
) -> None:
    """Fill y with norm_swiglu in torch."""
    swiglu.norm_reference(_product(h, linear), h, linear.b, eps, y, activation)


def qkv_reference(h: torch.Tensor, linear: Affine, eps: float, out: HeadOutput) -> None:
    """Fill out.q and change out.cache with norm_qkv in torch."""
    rotate_store.reference(_product(h, linear), h, linear.b, eps, out)


def _product(x: torch.Tensor, linear: Affine) -> torch.Tensor:
    product = x.float() @ linear.matrix.T
    return product.to(x.dtype).float() if x.dtype == torch.bfloat16 else product


def add_launch(stream: ResidualStream, a: torch.Tensor, linear: Affine, tile: Tile, counters: torch.Tensor) -> None:
    """Change the stream; `counters` int32 [>= N // tile.BN] are zero before and after."""
    if not linear.launches:
        return add_reference(stream, a, linear)
    fusion = Fusion(epilogue.load_residual, epilogue.add_residual, (linear.b, stream.partial))
    return launch(fusion, tile, linear, a, stream.h, counters=counters)


def swiglu_launch(
    stream: ResidualStream, linear: Affine, gate: Gate, y: torch.Tensor, tile: Tile, counters: torch.Tensor
) -> None:
    """Fill y."""
    if not linear.launches:
        return swiglu_reference(stream.h, linear, gate.eps, y, gate.activation)
    fusion = gated_fusion(gate, linear.w.shape[0] // 2)
    return launch(fusion, tile, linear, stream.h, y, stream.partial, counters)


def qkv_launch(
    stream: ResidualStream, linear: Affine, eps: float, out: HeadOutput, tile: Tile, counters: torch.Tensor
) -> None:
    """Fill out.q and change out.cache."""
    h = stream.h
    if not linear.launches:
        return qkv_reference(h, linear, eps, out)
    if out.is_behind or not holds_heads(tile, out.cache.shape[-1] // 2):
        product = sums_launch(h, linear, tile, counters)
        return rotate_store.launch(product, h, linear.b, eps, out, stream.partial)
    return launch(heads_fusion(out, eps), tile, linear, h, out.q, stream.partial, counters)


def sums_launch(x: torch.Tensor, linear: Affine, tile: Tile, counters: torch.Tensor) -> torch.Tensor:
    """Return W x of x [M, K], a new tensor [M, N]: rounded in bf16, else in float32."""
    if not linear.launches:
        return _product(x, linear)
    dtype = x.dtype if x.dtype == torch.bfloat16 else torch.float32
    y = torch.empty((x.shape[0], linear.w.shape[0]), dtype=dtype, device=x.device)
    launch(Fusion(epilogue.load_nothing, epilogue.store_sums), tile, linear, x, y, counters=counters)
    return y


def gated_fusion(gate: Gate, span: int) -> Fusion:
    """Return the norm before gate and up, `span` rows apart, and the activation of their product."""
    return Fusion(epilogue.load_nothing, epilogue.STORE_GATED[gate.activation], eps=gate.eps, span=span)


def heads_fusion(out: HeadOutput, eps: float) -> Fusion:
    """Return the norm before heads, and their rotation on the way to queries and pages."""
    q, cache, layer, rotation, _, scales = out
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    operands = rotation, cache[:, layer], cache.stride(0), scales
    heads = HeadSplit(q.shape[1] // head_dim, kv_heads, block_size)
    return Fusion(epilogue.load_angles, epilogue.store_heads, operands, eps, span=head_dim // 2, heads=heads)


def launch(
    fusion: Fusion, tile: Tile, linear: Affine, x: torch.Tensor, y: torch.Tensor,
    partial: torch.Tensor | None = None, counters: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill y from x [M, K] by the tile's kernel.

    `partial` is needed with a norm, `counters` if slices of K are shared out.
    """
    num_rows, (n, k) = x.shape[0], linear.w.shape
    rows = bucket(num_rows)
    if not num_rows or rows is None:
        return
    if tile.kind == "wide16":
        norms = None if fusion.eps is None else squares.norms(x, fusion.eps)
        wide16.launch(fusion, x, linear, y, norms)
        return
    pdl = has_dependent_launch(x.device)
    options = {"num_warps": tile.KW, "launch_pdl": True} if pdl else {"num_warps": tile.KW}
    bias = linear.b if fusion.eps is not None else None
    tensors = linear.operand, bias, x, y, num_rows, fusion.eps, partial, fusion.operands
    problem = Problem(n, k, rows, fusion.span, fusion.guard, fusion.heads, linear.slices, linear.kind)
    constants = fusion.load, fusion.store, problem, tile, pdl
    tiles = n // tile.BN
    if tile.kind == "gemv":
        gemv_kernel[(tiles,)](*tensors, *constants, **options)
        return
    partials = None
    if linear.slices > 1:
        slices = torch.empty(tiles * linear.slices * rows * tile.BN, dtype=torch.float32, device=x.device)
        partials = slices, counters
    wgmma_kernel[(tiles, linear.slices)](*tensors, partials, *constants, **options)
