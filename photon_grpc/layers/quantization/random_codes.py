"""Random numbers in quantized tensors, from normal numbers of deviation 1; dequantized they have deviation 0.02."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: The deviation of dequantized weights.
STD = 0.02
#: The deviation of random e4m3 values: large enough that few are subnormal, small enough that none is over 448.
_FLOAT_STD = 64.0
#: 0 to 15 without zero points other than 8: sqrt((16² - 1) / 12 + 0.5²); -127 to 127: sqrt((255² - 1) / 12).
DEVIATION = {"int4": 4.6368, "int8": 73.61, "fp8": _FLOAT_STD}


def words(normal: torch.Tensor) -> torch.Tensor:
    """Return int32 numbers whose bits look random."""
    bits = normal.contiguous().view(torch.int32)
    for shift, factor in ((16, -2048144789), (13, -1028477387)):  # those of MurmurHash3
        bits = (bits ^ (bits >> shift & 2 ** (32 - shift) - 1)) * factor
    return bits ^ (bits >> 16 & 0xFFFF)


def bytes_of(normal: torch.Tensor) -> torch.Tensor:
    """Return int8 numbers from -127 to 127."""
    return (words(normal) & 0xFF).sub(128).clamp(min=-127).to(torch.int8)


def floats(normal: torch.Tensor) -> torch.Tensor:
    return (normal * _FLOAT_STD).clamp(-448, 448).to(torch.float8_e4m3fn)


def constant(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that repeats the value."""
    kind = torch.int32 if isinstance(value, int) else torch.float32
    return lambda normal: torch.full_like(normal, value, dtype=kind)


def scale(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that repeats the scale of a kind of weights."""
    return constant(STD / DEVIATION[kind])
