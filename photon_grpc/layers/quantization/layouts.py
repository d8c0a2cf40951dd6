"""The layouts of quantized checkpoints: their tensors for a weight W [N, K], and the way from them to Codes.

| layout          | values                                      | zero points              | scales                    |
|-----------------|---------------------------------------------|--------------------------|---------------------------|
| gptq            | qweight int32 [K / p, N]: p columns a word  | qzeros [K / g, N / p]    | scales [K / g, N]         |
| awq             | qweight int32 [K, N / 8]: 8 rows a word     | qzeros [K / g, N / 8]    | scales [K / g, N]         |
| pack-quantized  | weight_packed int32 [N, K / p]              | [N / p, K / g] if any    | weight_scale [N, K / g]   |
| int-quantized   | weight int8 [N, K]                          | -                        | weight_scale [N, K / g]   |
| float-quantized | weight e4m3 [N, K]                          | -                        | weight_scale [N, 1], ...  |
| fp8             | weight e4m3 [N, K]                          | -                        | weight_scale_inv          |

p = 32 / bits values a word, the first in its lowest bits; AWQ's words hold rows in the order of AWQ_ORDER. GPTQ stores
zero points less 1, its second version as they are. Scales of a tensor are one number, of blocks [N / 128, K / 128].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from photon_grpc.kernels.linear.decode import packed
from photon_grpc.layers.quantization import random_codes
from photon_grpc.layers.quantization.stored import (
    SCALES,
    Codes,
    Stored,
    StoredNumbers,
    WeightSizes,
    check_floats,
    check_order,
    check_scales,
    check_shape,
    check_zeros,
)

#: Row of W among 8 that AWQ's nibble 0 … 7 holds.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SIGN = 0x80
#: Name without its suffix, tensors by suffix -> the weight.
Read = Callable[[str, dict[str, torch.Tensor], WeightSizes], Codes]


class Layout(NamedTuple):
    """The tensors of a weight, and how it is read from them."""

    stored: Callable[[WeightSizes], tuple[Stored, ...]]
    read: Read


def _word_tensors(shape: WeightSizes, qweight: Stored, zero_offset: int) -> tuple[Stored, ...]:
    """Return what GPTQ and AWQ have in common; zero points are stored less `zero_offset`."""
    zero = 2 ** (shape.format.bits - 1) - zero_offset
    words = int.from_bytes((zero | zero << 4 if shape.format.bits == 4 else zero).to_bytes() * 4, signed=True)
    groups = shape.num_groups
    columns = 0 if shape.has_groups else None
    return (
        qweight,
        Stored(".qzeros", (groups, shape.rows // shape.per_word), torch.int32, ("I32",), 1, columns,
               random=random_codes.constant(words), check=partial(_check_words, zero_offset=zero_offset)),
        Stored(".scales", (groups, shape.rows), shape.dtype, SCALES, 1, columns,
               random=random_codes.scale(shape.format.kind), check=check_scales),
        Stored(".g_idx", (shape.columns,), torch.int32, ("I32", "I64"), None, 0,
               default=(torch.arange(shape.columns) + shape.begin) // shape.group, check=check_order),
    )  # fmt: skip


def _check_words(name: str, values: StoredNumbers, shape: WeightSizes, zero_offset: int) -> None:
    """Check zero points [groups, N / p]."""
    check_zeros(name, _unpacked(values.read, shape.format.bits).int() + zero_offset, shape)


def _gptq_stored(shape: WeightSizes, zero_offset: int) -> tuple[Stored, ...]:
    words = (shape.columns // shape.per_word, shape.rows)
    qweight = Stored(".qweight", words, torch.int32, ("I32",), 1, 0, random=random_codes.words)
    return _word_tensors(shape, qweight, zero_offset)


def _gptq(name: str, tensors: dict[str, torch.Tensor], shape: WeightSizes, zero_offset: int) -> Codes:
    # Four bytes of a word are 4 or 8 columns of one row of W.
    values = tensors[".qweight"].view(torch.uint8).view(-1, shape.rows, 4).permute(1, 0, 2).reshape(shape.rows, -1)
    numbers = _unpacked(tensors[".qzeros"], shape.format.bits).int() + zero_offset
    return Codes(values if shape.format.bits == 4 else _signed(values), tensors[".scales"], _zeros(numbers, shape))


def _awq_stored(shape: WeightSizes) -> tuple[Stored, ...]:
    words = (shape.columns, shape.rows // shape.per_word)
    qweight = Stored(".qweight", words, torch.int32, ("I32",), 1, 0, random=random_codes.words)
    return _word_tensors(shape, qweight, 0)[:-1]


def _awq(name: str, tensors: dict[str, torch.Tensor], shape: WeightSizes) -> Codes:
    values = packed(_in_awq_order(tensors[".qweight"]).t().contiguous())
    return Codes(values, tensors[".scales"], _zeros(_in_awq_order(tensors[".qzeros"]), shape))


def _in_awq_order(words: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of int32 [K, N / 8] with the rows of W in their order: uint8 [K, N]."""
    nibbles = _unpacked(words, 4).view(words.shape[0], -1, 8)
    places = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    return nibbles[:, :, places].flatten(1)


def _pack_stored(shape: WeightSizes) -> tuple[Stored, ...]:
    groups = shape.num_groups
    columns = 1 if shape.has_groups else None
    words = (shape.rows, shape.columns // shape.per_word)
    found = [
        Stored(".weight_packed", words, torch.int32, ("I32",), random=random_codes.words),
        _scale(shape, ".weight_scale"),
        Stored(".weight_shape", (2,), torch.int64, ("I64", "I32"), None, None, default=torch.tensor(shape.whole),
               check=check_shape),
        Stored(".weight_g_idx", (shape.columns,), torch.int32, ("I32", "I64"), None, 0,
               default=(torch.arange(shape.columns) + shape.begin) // shape.group, check=check_order),
    ]  # fmt: skip
    if shape.format.has_zeros:
        zeros = (-(-shape.rows // shape.per_word), groups)
        found.append(
            Stored(".weight_zero_point", zeros, torch.int32, ("I32",), 0, columns,
                   random=random_codes.constant(-0x77777778), check=_check_packed)
        )  # fmt: skip
    return tuple(found)


def _pack(name: str, tensors: dict[str, torch.Tensor], shape: WeightSizes) -> Codes:
    values = tensors[".weight_packed"].view(torch.uint8)
    scales = _scales(tensors[".weight_scale"], shape)
    zeros = _zeros(_packed_zeros(tensors[".weight_zero_point"], shape), shape) if shape.format.has_zeros else None
    return Codes(values if shape.format.bits == 4 else _signed(values), scales, zeros)


def _packed_zeros(words: torch.Tensor, shape: WeightSizes) -> torch.Tensor:
    """Return the zero points [groups, N] in words [N / p, groups]."""
    return _unpacked(words.t(), shape.format.bits)[:, : shape.rows].contiguous()


def _check_packed(name: str, values: StoredNumbers, shape: WeightSizes) -> None:
    check_zeros(name, _packed_zeros(values.read, shape), shape)


def _int_stored(shape: WeightSizes) -> tuple[Stored, ...]:
    values = (shape.rows, shape.columns)
    weight = Stored(".weight", values, torch.int8, ("I8",), random=random_codes.bytes_of)
    return weight, _scale(shape, ".weight_scale")


def _int(name: str, tensors: dict[str, torch.Tensor], shape: WeightSizes) -> Codes:
    return Codes(tensors[".weight"], _scales(tensors[".weight_scale"], shape))


def _float_stored(shape: WeightSizes, suffix: str) -> tuple[Stored, ...]:
    values = (shape.rows, shape.columns)
    weight = Stored(".weight", values, torch.float8_e4m3fn, ("F8_E4M3",), random=random_codes.floats,
                    check=check_floats)  # fmt: skip
    return weight, _scale(shape, suffix)


def _float(name: str, tensors: dict[str, torch.Tensor], shape: WeightSizes, suffix: str) -> Codes:
    return Codes(tensors[".weight"], _scales(tensors[suffix], shape))


def _scale(shape: WeightSizes, suffix: str) -> Stored:
    """Return the tensor of scales: one number, one a row, one a group of a row, or one a block."""
    rows = shape.format.block[0]
    random = random_codes.scale(shape.format.kind)
    if not rows:
        return Stored(suffix, (1,), shape.dtype, SCALES, None, None, random=random, check=check_scales)
    sizes = (-(-shape.rows // rows), shape.num_groups)
    columns = 1 if shape.has_groups else None
    return Stored(suffix, sizes, shape.dtype, SCALES, 0, columns, random=random, check=check_scales)


def _zeros(numbers: torch.Tensor, shape: WeightSizes) -> torch.Tensor | None:
    """Return integer zero points in the dtype of scales, None if the format has none: then all are the middle."""
    return numbers.to(shape.dtype) if shape.format.has_zeros else None


def _scales(scales: torch.Tensor, shape: WeightSizes) -> torch.Tensor:
    """Return [groups or blocks of columns, N or blocks of rows]."""
    if not shape.format.block[0]:
        return scales.expand(1, shape.rows).contiguous()
    return scales.t().contiguous()


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values in int32 [M, N / p] side by side: uint8 [M, N]."""
    parts = words.contiguous().view(torch.uint8)
    return parts if bits == 8 else torch.stack((parts & 15, parts >> 4), dim=-1).flatten(-2)


def _signed(values: torch.Tensor) -> torch.Tensor:
    """Return bytes less 128."""
    return (values ^ _SIGN).view(torch.int8)


LAYOUTS: dict[str, Layout] = {
    "gptq": Layout(lambda shape: _gptq_stored(shape, 1), lambda *read: _gptq(*read, zero_offset=1)),
    "gptq_v2": Layout(lambda shape: _gptq_stored(shape, 0), lambda *read: _gptq(*read, zero_offset=0)),
    "awq": Layout(_awq_stored, _awq),
    "pack-quantized": Layout(_pack_stored, _pack),
    "int-quantized": Layout(_int_stored, _int),
    "float-quantized": Layout(
        lambda shape: _float_stored(shape, ".weight_scale"), lambda *read: _float(*read, suffix=".weight_scale")
    ),
    "fp8": Layout(
        lambda shape: _float_stored(shape, ".weight_scale_inv"), lambda *read: _float(*read, suffix=".weight_scale_inv")
    ),
}
