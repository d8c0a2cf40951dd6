"""Weights of 8 and of 4 bits in a kernel: the order in which it holds them, and their numbers in its registers.

A thread of a matrix product holds the columns 8h + 2t + i of each 16 columns of a row (t its number in its group of
four; h and i are 0 or 1). `arrange` moves the columns within 16 (of 8 bits) or 32 (of 4 bits), so that one word of 32
bits has those of one thread, and decoding yields the columns in their natural order: sums have the bits that they have
with a weight of 16 bits.

    8 bits: byte 2i + h of word t          of 16 columns is column 8h + 2t + i
    4 bits: nibble 4i + 2c + h of word t   of 32 columns is column 16c + 8h + 2t + i

Device functions decode two columns (i = 0 and 1) at a time with masks and sums that are exact: bits below those of
128.0 in bf16, or of 1024.0 in fp16, are an integer. The products with s and with g round once each, so that they have
the bits of `weight.dequantize`. All are fma, which sm_80 has for bf16: x + c as x · 1 + c, x · y as x · y - 0.
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
        return values.view(rows, -1, 2, 4, 2).permute(0, 1, 3, 4, 2).reshape(values.shape)
    parts = unpacked(values).view(rows, -1, 2, 2, 4, 2)
    return packed(parts.permute(0, 1, 4, 5, 2, 3).reshape(rows, -1))


def natural(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return what was arranged."""
    rows = values.shape[0]
    if bits == 8:
        return values.view(rows, -1, 4, 2, 2).permute(0, 1, 4, 2, 3).reshape(values.shape)
    parts = unpacked(values).view(rows, -1, 4, 2, 2, 2)
    return packed(parts.permute(0, 1, 4, 5, 2, 3).reshape(rows, -1))


def unpacked(values: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of uint8 [N, K / 2], the low one of a byte first: uint8 [N, K]."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)


def packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Return what was unpacked."""
    low, high = nibbles.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


@constexpr_function
def unpacking(bits: int, is_bf16: bool) -> str:
    """Return PTX from a word of 8 bits a value to q, of 4 to 128 + q or 1024 + q; two columns a register."""
    constants, count = "", 2
    if bits == 8 and is_bf16:
        # The seven low bits on 128, less 128, or less 256 if the value is negative.
        constants = "mov.b32 one, 0x3f803f80;"
        pair = (
            "lop3.b32 a, w, 0x007f007f, 0x43004300, 0xea;"
            "lop3.b32 b, w, 0x00800080, 0xc300c300, 0xea;"
            "fma.rn.bf16x2 $OUT, a, one, b;"
        )
    elif bits == 8:
        # 1024 + 128 + q, less 1152.
        constants = "mov.b32 one, 0x3c003c00; mov.b32 b, 0xe480e480;"
        pair = "lop3.b32 a, w, 0x00ff00ff, 0x64806480, 0x6a; fma.rn.f16x2 $OUT, a, one, b;"
    else:
        count = 4
        magic = "0x43004300" if is_bf16 else "0x64006400"
        pair = "lop3.b32 $OUT, w, 0x000f000f, " + magic + ", 0xea;"
    lines = [
        "shr.u32 w, $" + str(count) + ", " + str(bits * i) + ";" + pair.replace("OUT", str(i)) for i in range(count)
    ]
    return "{.reg .b32 w, a, b, one;" + constants + "".join(lines) + "}"


@constexpr_function
def scaling(has_offset: bool, is_bf16: bool) -> str:
    """Return PTX of two products: $1 · $2, or ($1 + $3) · $2 with the sum exact."""
    kind, unit = ("bf16x2", "0x3f803f80") if is_bf16 else ("f16x2", "0x3c003c00")
    given, added = "$1", ""
    if has_offset:
        given, added = "a", "mov.b32 one, " + unit + "; fma.rn." + kind + " a, $1, one, $3;"
    product = "fma.rn." + kind + " $0, " + given + ", $2, nothing;"
    return "{.reg .b32 a, one, nothing; mov.b32 nothing, 0x80008000;" + added + product + "}"


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
def unpacked_columns(words, BITS: gl.constexpr, kind: gl.constexpr):
    """Return packed bytes [S, BN, width] as numbers of `kind` [S, BN, columns] in natural order: see `unpacking`."""
    S: gl.constexpr = words.shape[0]
    BN: gl.constexpr = words.shape[1]
    BLOCKS: gl.constexpr = words.shape[2] // 16
    ASM: gl.constexpr = unpacking(BITS, kind == gl.bfloat16)
    if BITS == 8:
        numbers = gl.inline_asm_elementwise(ASM, "=r,=r,r", [words], kind.value, True, 4)
        blocks = numbers.reshape([S, BN, BLOCKS, 4, 2, 2]).permute([0, 1, 2, 4, 3, 5])
        return blocks.reshape([S, BN, BLOCKS * 16])
    else:
        first, second = gl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [words], (kind.value, kind.value), True, 4)
        blocks = gl.join(first, second).reshape([S, BN, BLOCKS, 4, 2, 2, 2]).permute([0, 1, 2, 6, 4, 3, 5])
        return blocks.reshape([S, BN, BLOCKS * 32])


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
    """Return W [S, BN, columns] in `layout`, whose threads hold pairs of columns.

    words: packed bytes in a `packed_layout`. In shared memory: scales and zeros of G equal groups of columns,
    [S, G, BN], norm [S, 1, columns]; None as P.WEIGHT says.
    """
    kind: gl.constexpr = scales.dtype
    numbers = gl.convert_layout(unpacked_columns(words, P.WEIGHT.BITS, kind), layout, assert_trivial=True)
    S: gl.constexpr = numbers.shape[0]
    BN: gl.constexpr = numbers.shape[1]
    COLUMNS: gl.constexpr = numbers.shape[2]
    HAS_OFFSET: gl.constexpr = P.WEIGHT.BITS == 4
    SCALING: gl.constexpr = scaling(HAS_OFFSET, kind == gl.bfloat16)
    groups = numbers.reshape([S, BN, G, COLUMNS // G])
    apart: gl.constexpr = gl.SliceLayout(3, groups.type.layout)
    by = scales.permute([0, 2, 1]).load(apart)[:, :, :, None]
    if HAS_OFFSET:
        offset = offsets(zeros, [S, BN, G], kind, apart)[:, :, :, None]
        groups = gl.inline_asm_elementwise(SCALING, "=r,r,r,r", [groups, by, offset], kind.value, True, 2)
    else:
        groups = gl.inline_asm_elementwise(SCALING, "=r,r,r", [groups, by], kind.value, True, 2)
    w = gl.convert_layout(groups.reshape([S, BN, COLUMNS]), layout, assert_trivial=True)
    if norm is not None:
        TIMES: gl.constexpr = scaling(False, kind == gl.bfloat16)
        w = gl.inline_asm_elementwise(TIMES, "=r,r,r", [w, norm.load(layout)], kind.value, True, 2)
    return w


@gluon_jit
def offsets(zeros, shape: gl.constexpr, kind: gl.constexpr, layout: gl.constexpr):
    """Return what makes q - z of unpacked nibbles: -(128 + z) in bf16, -(1024 + z) in fp16."""
    BASE: gl.constexpr = 128.0 if kind == gl.bfloat16 else 1024.0
    if zeros is None:
        return gl.full(shape, -BASE - 8.0, kind, layout)
    else:
        return (-BASE - zeros.permute([0, 2, 1]).load(layout).to(gl.float32)).to(kind)
