"""Packed weights in a thread's registers: every pattern decoded, and each column where the matrix units want it.

The PTX of `decode.py` is carried out here instruction by instruction; where a thread's columns belong is said by the
manual's figure of the first operand of m16n8k16, which wgmma's operand in registers shares.
"""

from __future__ import annotations

import re

import pytest
import torch

from photon_grpc.kernels.linear import decode
from photon_grpc.kernels.linear.decode import arrange, holds, natural, product, products, unpacking
from photon_grpc.kernels.linear.weight import WeightKind, dequantize
from tests.kernels.packed import KINDS, arranged, numbers, packed_weight

pytest.importorskip("triton")
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
Registers = dict[str, torch.Tensor]


def carried_out(ptx: str, given: dict[str, torch.Tensor]) -> Registers:
    """Return the registers that straight-line PTX leaves, each int64 [...] of 32 bits."""
    registers = dict(given)

    def value(name: str) -> torch.Tensor:
        return torch.tensor(int(name, 0)) if name[0].isdigit() else registers[name]

    for line in re.sub(r"[{}]|\.reg [^;]*;", "", ptx).split(";"):
        if not line.strip():
            continue
        operation, operands = line.split(None, 1)
        to, *names = [name.strip() for name in operands.split(",")]
        inputs = [value(name) for name in names]
        registers[to] = {
            "mov": lambda a: a, "shr": lambda a, b: a >> b, "and": lambda a, b: a & b, "lop3": lop3, "prmt": prmt,
            "fma": fma(operation),
        }[operation.split(".")[0]](*inputs)  # fmt: skip
    return registers


def lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look every bit of the result up by the bits of a, b and c."""
    found = torch.zeros_like(a | b | c)
    for bit in range(32):
        index = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
        found = found | (table >> index & 1) << bit
    return found


def prmt(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """Take four of the eight bytes of a and b, the lowest first."""
    both = a | b << 32
    chosen = [int(selector) >> 4 * place & 7 for place in range(4)]
    return sum(((both >> 8 * byte & 0xFF) << 8 * place for place, byte in enumerate(chosen)), torch.zeros_like(a))


def fma(operation: str):  # type: ignore[no-untyped-def]
    dtype = torch.bfloat16 if "bf16" in operation else torch.float16

    def both_halves(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        assert ".rn." in operation
        return joined(*((p * q + r).to(dtype) for p, q, r in zip(*(halves(x, dtype) for x in (a, b, c)), strict=True)))

    return both_halves


def halves(register: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return both numbers of a register, in float64."""
    parts = (register & 0xFFFF, register >> 16 & 0xFFFF)
    return [(part - (part >> 15 << 16)).to(torch.int16).view(dtype).double() for part in parts]


def joined(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return (low.view(torch.int16).long() & 0xFFFF) | (high.view(torch.int16).long() & 0xFFFF) << 16


#: What a word's number is a multiple of, and what it is above.
UNIT = {torch.bfloat16: (2.0**-133, 0), torch.float16: (1.0, 1024)}
SCALES = [2e-7, 0.0123, 0.0431, 1.0, 7.3, -0.3, 0.0]


@each_dtype
def test_every_byte_is_decoded_wherever_it_is_in_its_word(dtype: torch.dtype) -> None:
    byte, (unit, base) = torch.arange(256), UNIT[dtype]
    for place in range(4):
        # Other bytes of the word are anything.
        word = byte << 8 * place | (byte * 0x9E3779B1 & 0xFFFFFFFF & ~(0xFF << 8 * place))
        found = carried_out(unpacking(8, dtype == torch.bfloat16), {"$2": word})
        assert torch.equal(halves(found[f"${place % 2}"], dtype)[place // 2], byte * unit + base)


def test_a_number_and_its_scale_are_rounded_once() -> None:
    scale = torch.cat((torch.tensor(SCALES), torch.randn(500, generator=torch.Generator().manual_seed(0)) * 0.01))
    scale = scale.bfloat16()
    for middle, step in ((128, 1), (8, 1), (8, 16)):
        q = torch.arange(2 * middle)
        numbers = (q * step * 2.0**-133).bfloat16()
        by, offset = scale * (2.0**117 / step), scale * (-middle / 65536)
        given = {"$1": joined(numbers, numbers)[:, None], "$2": joined(by, by), "$3": joined(offset, offset)}
        mine = halves(carried_out("fma.rn.bf16x2 $0, $1, $2, $3;", given)["$0"], torch.bfloat16)
        expected = ((q - middle).double()[:, None] * scale.double()).bfloat16().double()
        assert torch.equal(mine[0] * 65536, expected)


@each_dtype
@pytest.mark.parametrize("zero", range(17))
def test_every_nibble_less_any_zero_is_scaled(zero: int, dtype: torch.dtype) -> None:
    nibble, (unit, base), is_bf16 = torch.arange(16), UNIT[dtype], dtype == torch.bfloat16
    scale = torch.tensor(SCALES, dtype=dtype)
    by = scale * 2.0**-9 if is_bf16 else scale
    for place in range(8):
        word = nibble << 4 * place | (nibble * 0x9E3779B1 & 0xFFFFFFFF & ~(0xF << 4 * place))
        pair = place % 4
        # The first and the third pair of a word are in registers 0 and 1.
        found = carried_out(unpacking(4, is_bf16), {"$4": word})[f"${pair // 2 + pair % 2 * 2}"]
        is_high = pair % 2 == 1
        step = 16 if is_high else 1
        assert torch.equal(halves(found, dtype)[place // 4], nibble * step * unit + base)
        offset = torch.tensor(-zero / 128 if is_bf16 else -base / step - zero).to(dtype)
        given = {"$1": found[:, None], "$2": joined(by, by), "$3": joined(offset, offset)}
        mine = halves(carried_out(products(is_bf16, is_high), given)["$0"], dtype)[place // 4]
        expected = ((nibble - zero).double()[:, None] * scale.double()).to(dtype).double()
        assert torch.equal(mine * (65536 if is_bf16 else 1), expected)


@each_dtype
def test_a_product_is_rounded_once(dtype: torch.dtype) -> None:
    w = torch.arange(-128, 128).to(dtype)
    norm = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * 0.01).to(dtype)
    given = {"$1": joined(w, w)[:, None], "$2": joined(norm, norm)}
    mine = halves(carried_out(product(dtype == torch.bfloat16), given)["$0"], dtype)
    assert torch.equal(mine[0], (w.double()[:, None] * norm.double()).to(dtype).double())


@pytest.mark.parametrize(
    ("scale", "expected"), [(0.0, True), (-1e-4, True), (1000.0, True), (2e3, False), (1e-30, False)]
)
def test_scales_that_leave_the_range_of_numbers_are_declined(scale: float, expected: bool) -> None:
    assert holds(torch.tensor([1.0, scale])) is expected


def columns_of_thread(t: int) -> list[tuple[int, int]]:
    """Return (register, column) of the operand's 16 columns, as the manual has them for its row `lane // 4`."""
    return [(a // 4, t * 2 + a % 2 + (8 if a >= 4 else 0)) for a in (0, 1, 4, 5)]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_word_has_the_columns_of_a_thread(bits: int) -> None:
    kind, columns = WeightKind(bits, 32), decode.WORD_COLUMNS[bits]
    weight = packed_weight(3, 128, kind)
    whole = numbers(weight._replace(scales=torch.ones_like(weight.scales), zeros=torch.zeros_like(weight.scales)))
    blocks = whole.view(3, -1, columns)
    words = arranged(weight).values.view(torch.int32).long() & 0xFFFFFFFF
    word = words.view(3, -1, 4)
    for t in range(4):
        found = carried_out(unpacking(bits, True), {f"${16 // bits}": word[:, :, t]})
        for step in range(columns // 16):
            for half, column in columns_of_thread(t):
                register, factor = (half, 1) if bits == 8 else (step + 2 * half, 1 + 15 * half)
                mine = halves(found[f"${register}"], torch.bfloat16)[column % 2] * 2.0**133 / factor
                assert torch.equal(mine - (128 if bits == 8 else 0), blocks[:, :, 16 * step + column])


@pytest.mark.parametrize(("parts", "rows", "width", "warps"), [(1, 16, 128, 1), (2, 32, 64, 4), (1, 128, 32, 4)])
def test_a_threads_bytes_are_words_of_the_rows_of_its_operand(parts: int, rows: int, width: int, warps: int) -> None:
    layout = decode.packed_layout(parts, rows, width, warps)
    seen = set()
    for warp in range(warps):
        for lane in range(32):
            for register in range(1 << len(layout.reg_bases)):
                at = [0, 0, 0]
                for bases, number in (
                    (layout.reg_bases, register),
                    (layout.lane_bases, lane),
                    (layout.warp_bases, warp),
                ):
                    for bit, base in enumerate(bases):
                        at = [a ^ b for a, b in zip(at, base, strict=True)] if number >> bit & 1 else at
                part, row, byte = at
                seen.add((part, row, byte))
                # Four registers are a word, of the thread's number in its group; rows are those of the lane and warp.
                assert (byte % 4, byte // 4 % 4, row % 8) == (register % 4, lane % 4, lane // 4)
                assert (row // 16 % (warps // parts), part) == (warp % (warps // parts), warp // (warps // parts))
    assert len(seen) == parts * rows * width


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_arranged_weights_stand_for_the_same_numbers(kind: WeightKind) -> None:
    weight = packed_weight(5, 256, kind)
    moved = arranged(weight)
    assert not torch.equal(moved.values, weight.values)
    assert torch.equal(natural(arrange(weight.values, kind.BITS), kind.BITS), weight.values)
    assert moved.shape == weight.shape == (5, 256)
    for given in (weight, moved):
        assert torch.equal(dequantize(given, torch.bfloat16).double(), numbers(weight))
