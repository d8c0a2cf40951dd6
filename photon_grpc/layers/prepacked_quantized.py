"""A weight of 8 or of 4 bits in the form that this CPU multiplies fastest with activations of 16 or 32 bits.

| scales            | kept as                              | one row is multiplied by                     |
|-------------------|--------------------------------------|----------------------------------------------|
| one a row of W    | FBGEMM's tiles of int8, 1 byte       | FBGEMM's product of integers, x in pieces    |
| one a group       | rows of a table of bytes, 1.08 bytes | FBGEMM's sum of weighted rows of a table     |
| the same, 4 bits  | torch's tiles and nibbles, 1 byte    | torch's product of 4 bits, with AVX-512 only |

Time of the four products of a layer of Llama-3.2-1B's shape for one row, as a share of HalfWeight's, with one thread
and with two of an EPYC (Zen 3) with AVX2: the product of tiles 0.45 and 0.46, the sum of the table 0.54 and 0.69;
torch's own product of int8 0.85 and 0.84, of int4 1.04 with one thread, both in bfloat16; of int4 with AVX-512 0.23.
More rows: `benchmarks/results/cpu_products.md`.

Both compute (q - z) · s with s in float32, where a 16-bit weight would be that number rounded to the compute dtype, and
both round their result once. `pack_quantized` declines what it cannot hold.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from photon_grpc.kernels.linear.decode import natural, packed, unpacked
from photon_grpc.kernels.linear.weight import QuantizedWeight
from photon_grpc.layers.prepacked import Packed, multiplies_half

#: Outputs of a block of the table: as many as FBGEMM sums in the registers of AVX2 at once.
WIDTH = 96
#: Rows of x up to which the table is summed. Above it is dequantized into a scratch and multiplied as float32.
FEW_ROWS = 16
#: Blocks in that scratch.
_SCRATCH_BLOCKS = 8
#: Groups of columns and multiples of outputs that torch's product of 4 bits has.
_NIBBLE_GROUPS, _NIBBLE_ROWS = (32, 64, 128, 256), 64
#: Bytes behind each row of the table: a scale and an offset, float32.
_SCALE_BYTES = 8
#: Values of a piece of x are -64 to 63. With 127 for the weight AVX2's sums of two products stay within 16 bits.
_BASE = 128
#: The largest number of three such pieces.
_LARGEST = float(63 * (_BASE * _BASE + _BASE + 1))
_LEAST_SCALE = 1e-30


class PackedQuantized(Packed, Protocol):
    """A Packed that knows its size in bytes."""

    num_bytes: int


def pack_quantized(weight: QuantizedWeight, bias: torch.Tensor | None) -> PackedQuantized | None:
    """Return the weight packed; None if this build or this CPU lacks FBGEMM, or q - z does not fit into 8 bits."""
    if weight.values.device.type != "cpu" or weight.norm is not None or not multiplies_half():
        return None
    numbers = _numbers(weight)
    if numbers is None:
        return None
    if weight.scales.shape[0] == 1:
        return IntegerWeight(numbers, weight.scales, bias)
    if bias is None and holds_nibbles(weight) and torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return NibbleWeight(numbers, weight.scales)
    return TableWeight(numbers, weight.scales, bias)


def holds_nibbles(weight: QuantizedWeight) -> bool:
    """Return whether NibbleWeight can hold a weight: its scales are bfloat16 as torch's are, and it has no zeros."""
    rows, group = weight.values.shape[0], weight.kind.GROUP
    fits = weight.kind.BITS == 4 and weight.zeros is None and rows % _NIBBLE_ROWS == 0 and group in _NIBBLE_GROUPS
    return fits and weight.scales.dtype == torch.bfloat16


def _numbers(weight: QuantizedWeight) -> torch.Tensor | None:
    """Return q - z, int8 [N, K]; None if one of them is no such number."""
    bits = weight.kind.BITS
    values = natural(weight.values, bits) if weight.is_arranged else weight.values
    if bits == 8:
        return values if weight.zeros is None else None
    nibbles = unpacked(values).view(torch.int8)
    if weight.zeros is None:
        return nibbles - 8
    zeros = weight.zeros.round()
    if not torch.equal(zeros, weight.zeros) or bool((zeros.abs() > 64).any()):
        return None
    rows, columns = nibbles.shape
    return (nibbles.view(rows, zeros.shape[0], -1) - zeros.t()[:, :, None].to(torch.int8)).view(rows, columns)


class IntegerWeight:
    """A weight with one scale a row, in FBGEMM's tiles of int8.

    A row of x is rounded to 21 bits of its largest number, in three pieces of 7 bits that are multiplied as integers;
    their sums are exact. -128, which a checkpoint may hold, is no exception: the pieces are chosen so that no sum
    saturates.
    """

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        zeros = torch.zeros(numbers.shape[0], dtype=torch.long)
        quantized = torch._make_per_channel_quantized_tensor(numbers.contiguous(), scales.view(-1).double(), zeros, 0)
        self._tiles = torch.ops.quantized.linear_prepack(quantized, None)
        self.num_bytes = numbers.numel() + scales.numel() * 4
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x).to(x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(1, keepdim=True).float().clamp_(min=_LEAST_SCALE).div_(_LARGEST)
        low, middle, high = self._multiply(_pieces(x / scale), 1.0, _BASE // 2, self._tiles).view(3, x.shape[0], -1)
        product = low.add_(middle, alpha=_BASE).add_(high, alpha=_BASE * _BASE).mul_(scale)
        return product if self._bias is None else product.add_(self._bias)


def _pieces(x: torch.Tensor) -> torch.Tensor:
    """Return the rounded numbers' digits to the base 128, the lowest first: [T, K] -> [3 T, K]."""
    whole = x.round()
    above = whole.add(_BASE // 2).div_(_BASE).floor_()
    high = above.add(_BASE // 2).div_(_BASE).floor_()
    return torch.cat((whole.sub_(above, alpha=_BASE), above.sub_(high, alpha=_BASE), high))


class TableWeight:
    """A weight with one scale for each group of columns.

    The table has WIDTH outputs to a row and K rows to each such block; products and sums are float32. Up to FEW_ROWS
    rows of x are multiplied one by one, so that a row has the same bits beside others.
    """

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._num_outputs, self._num_inputs = numbers.shape
        self._num_blocks = -(-self._num_outputs // WIDTH)
        self._table = _table(numbers, self._num_blocks)
        self._scales = _blocks(scales.float().t(), self._num_blocks)
        self.num_bytes = self._table.nbytes + self._scales.nbytes
        self._bias = None if bias is None else bias.float()
        self._sum = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default
        self._unpack = torch.ops.quantized.embedding_bag_byte_unpack.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x).to(x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        wide = torch.stack([self._row(row) for row in x]) if len(x) <= FEW_ROWS else self._rows(x)
        product = wide[:, : self._num_outputs]
        return product if self._bias is None else product + self._bias

    def _row(self, x: torch.Tensor) -> torch.Tensor:
        num_groups = self._scales.shape[1]
        rows, starts = _bags(self._num_blocks * self._num_inputs, self._num_inputs // num_groups)
        weights = x.expand(self._num_blocks, -1).reshape(-1)
        sums = self._sum(self._table, rows, starts, False, 0, False, weights, None, False)
        return sums.view(self._scales.shape).mul_(self._scales).sum(1).view(-1)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, columns = x.shape
        wide = x.new_empty(num_rows, self._num_blocks, WIDTH)
        blocks = self._table.view(self._num_blocks, columns, -1)
        for first in range(0, self._num_blocks, _SCRATCH_BLOCKS):
            some = slice(first, first + _SCRATCH_BLOCKS)
            scales = self._scales[some]
            numbers = self._unpack(blocks[some].flatten(0, 1)).view(*scales.shape[:2], -1, WIDTH)
            weights = numbers.mul_(scales.unsqueeze(2)).view(-1, columns, WIDTH)
            wide[:, some] = torch.matmul(x, weights).transpose(0, 1)
        return wide.flatten(1)


class NibbleWeight:
    """A weight of 4 bits with a scale for each group, in torch's own tiles, for activations in bfloat16.

    Sums are float32 and each row of x has a chain of its own, so that a row has the same bits beside others up to
    FEW_ROWS. More rows, and logits, are products of float32 with some outputs dequantized at a time.
    """

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        nibbles = numbers + 8
        self._tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles.int(), 1)
        self._scales_zeros = torch.stack((scales, torch.zeros_like(scales)), -1)
        self._nibbles, self._group = packed(nibbles.view(torch.uint8)), numbers.shape[1] // scales.shape[0]
        self.num_bytes = self._tiles.nbytes + self._nibbles.nbytes + self._scales_zeros.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > FEW_ROWS:
            return self.logits(x).to(x.dtype)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._tiles, self._group, self._scales_zeros)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x, scales = x.float(), self._scales_zeros[..., 0].float().t().unsqueeze(2)
        wide = x.new_empty(len(x), len(scales))
        for first in range(0, len(scales), _SCRATCH_BLOCKS * WIDTH):
            some = slice(first, first + _SCRATCH_BLOCKS * WIDTH)
            numbers = unpacked(self._nibbles[some]).float().sub_(8).unflatten(1, (-1, self._group))
            wide[:, some] = x @ numbers.mul_(scales[some]).flatten(1).t()
        return wide


def _table(numbers: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return uint8 [num_blocks · K, WIDTH + 8]: the numbers + 128, then the scale 1 and the offset -128."""
    columns = numbers.shape[1]
    table = torch.empty(num_blocks, columns, WIDTH + _SCALE_BYTES, dtype=torch.uint8)
    table[:, :, :WIDTH] = _blocks(numbers.view(torch.uint8) ^ 128, num_blocks)
    table[:, :, WIDTH:] = torch.tensor([1.0, -128.0]).view(torch.uint8)
    return table.view(-1, WIDTH + _SCALE_BYTES)


def _blocks(values: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return [N, C] as [num_blocks, C, WIDTH], with zeros behind the last of the N."""
    padded = values.new_zeros(num_blocks * WIDTH, values.shape[1])
    padded[: values.shape[0]] = values
    return padded.view(num_blocks, WIDTH, -1).transpose(1, 2).contiguous()


@cache
def _bags(num_rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all rows of a table in order, and where each bag of so many begins; layers of one shape share them."""
    return torch.arange(num_rows, dtype=torch.int32), torch.arange(0, num_rows, length, dtype=torch.int32)
