"""Weights of 8 and of 4 bits in a kernel: the order in which it holds them, and their numbers in its registers.

A thread of a matrix product holds the columns 8h + 2t + i of each 16 columns of a row (t its number in its group of
four; h and i are 0 or 1). `arrange` moves the columns within 16 (of 8 bits) or 32 (of 4 bits), so that one word of 32
bits has those of one thread, and decoding yields the columns in their natural order: sums have the bits that they have
with a weight of 16 bits.

    8 bits: byte 2i + h of word t          of 16 columns is column 8h + 2t + i
    4 bits: nibble 4i + 2c + h of word t   of 32 columns is column 16c + 8h + 2t + i

In bf16 the bits of q that are left of a word, alone in a half of a register, are the number q · 2^-133: below 2^8 they
are a subnormal or of the first binade, which have the same steps. One fma makes of it the weight, with one rounding:

    round((q - z) · s) · 2^-16 = fma(q · 2^-133, s · 2^117, -z · s · 2^-16)       z = 128 or 8: the last is exact

where q of 8 bits has its sign's bit flipped when it is arranged, so that it is 128 more. With zeros of its own a weight
needs two. `unshifted` multiplies sums by 2^16. In fp16 the bits on those of 1024.0 are an integer, which is made exact
by one fma and multiplied by s in another. All are fma, which sm_80 has for bf16: x · y as x · y - 0.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.gluon import constexpr_function, gl, gluon_jit

#: Bits -> columns of which the words of four threads consist.
WORD_COLUMNS = {8: 16, 4: 32}


def arrange(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return values, int8 [N, K] or uint8 [N, K / 2], as kernels hold them."""
    rows = values.shape[0]
    if bits == 8:
        return (values ^ -128).view(rows, -1, 2, 4, 2).permute(0, 1, 3, 4, 2).reshape(values.shape)
    parts = unpacked(values).view(rows, -1, 2, 2, 4, 2)
    return packed(parts.permute(0, 1, 4, 5, 2, 3).reshape(rows, -1))


def natural(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `arrange`."""
    rows = values.shape[0]
    if bits == 8:
        return (values ^ -128).view(rows, -1, 4, 2, 2).permute(0, 1, 4, 2, 3).reshape(values.shape)
    parts = unpacked(values).view(rows, -1, 4, 2, 2, 2)
    return packed(parts.permute(0, 1, 4, 5, 2, 3).reshape(rows, -1))


def unpacked(values: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of uint8 [N, K / 2], the low one of a byte first: uint8 [N, K]."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)


def packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Undo `unpacked`."""
    low, high = nibbles.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def holds(scales: torch.Tensor) -> bool:
    """Return whether kernels can multiply by these scales: 0, or of size 2^-60 to 2^10."""
    size = scales.abs()
    return bool(((size == 0) | (size >= 2.0**-60) & (size < 2.0**10)).all())


@constexpr_function
def unpacking(bits: int, is_bf16: bool) -> str:
    """Return PTX from a word to registers of two columns: q · 2^-133 in bf16, 1024 + q in fp16; 16 q for q in some.

    Those are registers 2 and 3 of 4 bits, which have the columns of h = 1.
    """
    if bits == 8:
        taken = ["prmt.b32 $0, w, 0, 0x4240;", "prmt.b32 $1, w, 0, 0x4341;"]
        if not is_bf16:
            taken = ["prmt.b32 $0, w, 0x64, 0x4240;", "prmt.b32 $1, w, 0x64, 0x4341;"]
        return "{.reg .b32 w; mov.b32 w, $2;" + "".join(taken) + "}"
    lines = ["mov.b32 w, $4;"]
    for register, half in ((0, 0), (2, 4), (1, 8), (3, 12)):
        if half == 8:
            lines.append("shr.u32 w, w, 8;")
        mask = "0x00f000f0" if register > 1 else "0x000f000f"
        taken = "and.b32 $" + str(register) + ", w, " + mask + ";"
        if not is_bf16:
            taken = "lop3.b32 $" + str(register) + ", w, " + mask + ", 0x64006400, 0xea;"
        lines.append(taken)
    return "{.reg .b32 w;" + "".join(lines) + "}"


@constexpr_function
def products(is_bf16: bool, is_high: bool) -> str:
    """Return PTX of ($1 · c + $3) · $2, the sum exact, of q as it is unpacked.

    c is 2^126 in bf16, where $3 is -z · 2^-7, and 1 in fp16, where it is -(1024 + z). For 16 q it is a 16th, and
    $3 in fp16 is -(64 + z).
    """
    if is_bf16:
        kind, factor = "bf16x2", "0x7c807c80" if is_high else "0x7e807e80"
    else:
        kind, factor = "f16x2", "0x2c002c00" if is_high else "0x3c003c00"
    lines = "mov.b32 c, " + factor + "; mov.b32 nothing, 0x80008000;"
    lines += "fma.rn." + kind + " a, $1, c, $3; fma.rn." + kind + " $0, a, $2, nothing;"
    return "{.reg .b32 a, c, nothing;" + lines + "}"


@constexpr_function
def product(is_bf16: bool) -> str:
    """Return PTX of $1 · $2."""
    kind = "bf16x2" if is_bf16 else "f16x2"
    return "{.reg .b32 nothing; mov.b32 nothing, 0x80008000; fma.rn." + kind + " $0, $1, $2, nothing;}"


@constexpr_function
def packed_layout(parts: int, rows: int, width: int, num_warps: int) -> Any:
    """Return the layout of bytes [parts, rows, width]: a thread's words, for warps along rows, then along parts."""
    along_rows = num_warps // parts
    blocks = [[0, 0, 1 << bit] for bit in range(4, _log2(width))]
    repeated = [[0, 1 << bit, 0] for bit in range(_log2(16 * along_rows), _log2(rows))]
    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0], *blocks, *repeated]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 16 << bit, 0] for bit in range(_log2(along_rows))]
    warps += [[1 << bit, 0, 0] for bit in range(_log2(parts))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [parts, rows, width])


@constexpr_function
def _log2(power: int) -> int:
    return power.bit_length() - 1


@constexpr_function
def packed_swizzle(width: int) -> Any:
    """Return the layout of bytes [..., rows, width] in shared memory: eight rows of a matrix are in all banks."""
    chunks = width // 16
    rows = max(1, 8 // chunks)
    return gl.SwizzledSharedLayout(16, rows, 8 // rows, [2, 1, 0])


@gluon_jit
def halves(words, KW: gl.constexpr):
    """Return both halves of the columns of packed bytes [1, BN, width], each in its `packed_layout`."""
    BN: gl.constexpr = words.shape[1]
    HALF: gl.constexpr = words.shape[2] // 2
    at: gl.constexpr = packed_layout(1, BN, HALF, KW)
    first, second = gl.split(words.reshape([1, BN, 2, HALF]).permute([0, 1, 3, 2]))
    first = gl.convert_layout(first, at, assert_trivial=True)
    return first, gl.convert_layout(second, at, assert_trivial=True)


@gluon_jit
def decoded(words, scales, zeros, norm, G: gl.constexpr, P: gl.constexpr, layout: gl.constexpr):
    """Return W [S, BN, columns] in `layout`, whose threads hold pairs of columns; times 2^-16 in bf16 (`unshifted`).

    words: packed bytes in a `packed_layout`. In shared memory: scales and zeros of G equal groups of columns,
    [S, G, BN], norm [S, 1, columns]; None as P.WEIGHT says.
    """
    kind: gl.constexpr = scales.dtype
    BITS: gl.constexpr = P.WEIGHT.BITS
    S: gl.constexpr = words.shape[0]
    BN: gl.constexpr = words.shape[1]
    BLOCKS: gl.constexpr = words.shape[2] // 16
    ASM: gl.constexpr = unpacking(BITS, kind == gl.bfloat16)
    if BITS == 8:
        numbers = gl.inline_asm_elementwise(ASM, "=r,=r,r", [words], kind.value, True, 4)
        numbers = scaled(numbers, scales, zeros, G, BITS, False)
        blocks = numbers.reshape([S, BN, BLOCKS, 4, 2, 2]).permute([0, 1, 2, 4, 3, 5])
        w = blocks.reshape([S, BN, BLOCKS * 16])
    else:
        low, high = gl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [words], (kind.value, kind.value), True, 4)
        both = gl.join(scaled(low, scales, zeros, G, BITS, False), scaled(high, scales, zeros, G, BITS, True))
        blocks = both.reshape([S, BN, BLOCKS, 4, 2, 2, 2]).permute([0, 1, 2, 4, 6, 3, 5])
        w = blocks.reshape([S, BN, BLOCKS * 32])
    w = gl.convert_layout(w, layout, assert_trivial=True)
    if norm is not None:
        TIMES: gl.constexpr = product(kind == gl.bfloat16)
        w = gl.inline_asm_elementwise(TIMES, "=r,r,r", [w, norm.load(layout)], kind.value, True, 2)
    return w


@gluon_jit
def scaled(numbers, scales, zeros, G: gl.constexpr, BITS: gl.constexpr, IS_HIGH: gl.constexpr):
    """Return the weights, times 2^-16 in bf16, of numbers [S, BN, ...] as `unpacking` leaves them; IS_HIGH: of 16 q."""
    kind: gl.constexpr = numbers.dtype
    IS_BF16: gl.constexpr = kind == gl.bfloat16
    S: gl.constexpr = numbers.shape[0]
    BN: gl.constexpr = numbers.shape[1]
    WIDTH: gl.constexpr = numbers.shape[2]
    STEP: gl.constexpr = 16.0 if IS_HIGH else 1.0
    MIDDLE: gl.constexpr = 128.0 if BITS == 8 else 8.0
    groups = numbers.reshape([S, BN, G, WIDTH // G])
    apart: gl.constexpr = gl.SliceLayout(3, groups.type.layout)
    scale = scales.permute([0, 2, 1]).load(apart).to(gl.float32)
    if IS_BF16 and zeros is None:
        ASM: gl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;"
        by = scale * (2.0**117 / STEP)
        offset = scale * (-MIDDLE / 65536)
    else:
        ASM: gl.constexpr = products(IS_BF16, IS_HIGH)
        by = scale * (2.0**-9) if IS_BF16 else scale
        zero = scale * 0.0 + MIDDLE if zeros is None else zeros.permute([0, 2, 1]).load(apart).to(gl.float32)
        offset = zero * (-1.0 / 128) if IS_BF16 else -1024 / STEP - zero
    by = by.to(kind)[:, :, :, None]
    offset = offset.to(kind)[:, :, :, None]
    groups = gl.inline_asm_elementwise(ASM, "=r,r,r,r", [groups, by, offset], kind.value, True, 2)
    return groups.reshape([S, BN, WIDTH])


@gluon_jit
def unshifted(sums, kind: gl.constexpr, P: gl.constexpr):
    """Return the sums of a product with `decoded` weights of this dtype, or with weights of 16 bits, as they are."""
    if P.WEIGHT.BITS < 16 and kind == gl.bfloat16:
        return sums * 65536.0
    else:
        return sums
