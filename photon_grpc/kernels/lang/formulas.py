"""Formulas that several kernels compute, in Triton and in Gluon, with the same bits in each.

    rotated:      (a·cos - b·sin, b·cos + a·sin)
    gated:        act(gate) · up,  silu(x) = x / (1 + exp(-x)),  gelu(x) = x / (1 + exp(-2z)),
                  z = sqrt(2 / π) · (x + 0.044715 · x³)
    tree_sum:     Σ x over columns
    add_slices:   the sums of the slices of K, added in order
    round_e4m3:   x rounded to the nearest e4m3
    quotient:     x / y, correctly rounded, from 1 / y

A compiler may round a product before it is added to, or not; it chooses anew in every kernel. Here each sum of a
product is an explicit fma, which rounds once, and nothing is left to choose. A sum of many numbers is a tree of sums of
two, which are the same in either order: it does not depend on how threads share the numbers. Arguments are float32.
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
def gelu(x):
    """Return the tanh form of gelu; the numbers are -2 · sqrt(2 / π), and that times 0.044715."""
    return x / (1.0 + tl.exp(x * tl.fma(x * x, -0.07135481627260025, -1.5957691216057308)))


@jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return act(gate) · up; ACTIVATION: "silu" or "gelu"."""
    if ACTIVATION == "gelu":
        return gelu(gate) * up
    else:
        return silu_product(gate, up)


@jit
def tree_sum(x):
    """Return the sums [R] of x [R, N], N a power of two, added as (0 + 1) + (2 + 3) and so on."""
    if x.shape[1] == 1:
        return tl.reshape(x, [x.shape[0]])
    else:
        return tree_sum(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2))


@jit
def add_slices(at, stride, inside, SLICES: tl.constexpr):
    """Load the sums of slices, `stride` elements apart, and add them in order: zeros outside."""
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, SLICES):
        at += stride
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return total


@jit
def round_e4m3(x):
    """Return x rounded to the nearest e4m3, ties to even, in float32: the interpreter's own cast does not round so."""
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    # Below 2^-6 they are multiples of 2^-9; zeros keep their sign.
    small = ((tl.abs(x) + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | (bits & -2147483648)
    return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float32, bitcast=True)


@jit
def quotient(x, y, inverse):
    """Return x / y as `div_rn` does, from inverse = div_rn(1, y), for y of 2^-40 and more and |x / y| below 2^24.

    A division has a branch for operands at the ends of the range, and one waits for the other; these do not. The first
    correction leaves an error below that of a rounding, the second rounds as a division does (Markstein). Zeros keep
    their signs.
    """
    # `-x` is 0 - x, which loses the sign of a zero.
    minus_x, minus_inverse = x * -1.0, inverse * -1.0
    q = x * inverse
    q = tl.fma(tl.fma(q, y, minus_x), minus_inverse, q)
    return tl.fma(tl.fma(q, y, minus_x), minus_inverse, q)
