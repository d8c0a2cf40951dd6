"""Formulas that several kernels compute, in Triton and in Gluon, with the same bits in each.

    rotated:      (a·cos - b·sin, b·cos + a·sin)
    silu_product: silu(gate) · up,  silu(x) = x / (1 + exp(-x))
    scaled:       r · x + b

A compiler may round a product before it is added to, or not; it chooses anew in every kernel. Here each sum of a
product is an explicit fma, which rounds once, and nothing is left to choose. Arguments are float32 and broadcast.
"""

from __future__ import annotations

from photon_grpc.kernels.lang.jit import jit, tl


@jit
def rotated(a, b, cos, sin):
    """Return both halves of heads, rotated."""
    return tl.fma(a, cos, b * -sin), tl.fma(b, cos, a * sin)


@jit
def silu_product(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def scaled(x, scale, bias):
    return tl.fma(x, scale, bias)
