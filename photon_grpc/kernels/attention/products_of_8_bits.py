"""Products over keys and values of 8 bits, which both attention kernels compute in float16.

An H200 turns four numbers of e4m3 into float16 in two instructions, where bfloat16 takes four slow ones more or eleven
of another kind. All of them are exact in float16. Queries are rounded to it: those in bfloat16 have fewer digits than
it has, so they keep their value from 2^-14 to 65,504, and become that beyond it. Weights are at most 1, and have three
binary digits more than in bfloat16.
"""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import constexpr_function, gl, gluon_jit

#: Four numbers of e4m3 in a word -> two words of two numbers each.
TO_HALF = """{
    .reg .b16 first, second;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}"""


@constexpr_function
def widening() -> str:
    """Return TO_HALF, as kernels may read it."""
    return TO_HALF


@constexpr_function
def product_type(kind, chunk: int):
    """Return the type of products whose queries are of type `kind`, over pages with `chunk` numbers in 16 bytes."""
    return gl.float16 if chunk == 16 else kind


@gluon_jit
def widened(numbers):
    """Return numbers of e4m3 in float16; a thread has four side by side."""
    ASM: gl.constexpr = widening()
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [numbers.to(gl.uint8, bitcast=True)], gl.float16, True, 4)


@gluon_jit
def widened_words(words):
    """Return words of four numbers of e4m3 as (first two, last two) in float16."""
    ASM: gl.constexpr = widening()
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [words], (gl.int32, gl.int32), True, 1)


@gluon_jit
def rounded_query(query, kind: gl.constexpr):
    """Return a query in the type of products: what float16 does not hold becomes the largest that it does."""
    if query.dtype == kind:
        return query
    else:
        x = query.to(gl.float32)
        return gl.where(x > 65504.0, 65504.0, gl.where(x < -65504.0, -65504.0, x)).to(kind)
