"""The order in which kernels hold quantized weights.

A thread of a matrix product holds the columns 8h + 2t + i of each 16 columns of a row (t its number in its group of
four; h and i are 0 or 1). `arrange` moves the columns within 16 (of 8 bits) or 32 (of 4 bits), so that one word of 32
bits has those of one thread, and decoding yields the columns in their natural order: sums have the bits that they have
with a weight of 16 bits.

    8 bits: byte 2i + h of word t          of 16 columns is column 8h + 2t + i
    4 bits: nibble 4i + 2c + h of word t   of 32 columns is column 16c + 8h + 2t + i
"""

from __future__ import annotations

import torch

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
