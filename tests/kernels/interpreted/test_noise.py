"""The device's noise in the interpreter: the same bits as the reference."""

from __future__ import annotations

import torch

from photon_grpc.kernels.lang.jit import jit, tl
from photon_grpc.kernels.sampling import noise
from photon_grpc.kernels.sampling.noise import philox_word
from tests.kernels.sampling import noise_of

SEED = torch.tensor([0, -1, 0x299F31D0A4093822, -(2**63)])
POSITION = torch.tensor([0, 4095, 7, 2**31 - 1])
OUTPUT_INDEX = torch.tensor([0, 1, 2, 3])


@jit
def bits_kernel(seed, position, output_index, tokens, out, SIZE: tl.constexpr):
    row = tl.program_id(0)
    column = row * SIZE + tl.arange(0, SIZE)
    ids = tl.load(tokens + column).to(tl.uint32)
    position, output_index = tl.load(position + row).to(tl.uint32), tl.load(output_index + row).to(tl.uint32)
    x = philox_word(ids, position, output_index, ids * 0, tl.load(seed + row))
    tl.store(out + column, x.to(tl.int64))


def test_bits_are_equal() -> None:
    tokens = torch.randint(0, 2**31 - 1, (4, 64))
    out = torch.empty(4, 64, dtype=torch.int64)
    bits_kernel[(4,)](SEED, POSITION, OUTPUT_INDEX, tokens, out, SIZE=64)
    assert torch.equal(out, noise.uniform_bits(SEED, POSITION, OUTPUT_INDEX, tokens))


def test_noise_is_equal() -> None:
    tokens = torch.randint(0, 2**31 - 1, (4, 1500))
    mine = noise_of(SEED, POSITION, OUTPUT_INDEX, tokens)
    torch.testing.assert_close(mine, noise.reference(SEED, POSITION, OUTPUT_INDEX, tokens), rtol=1e-6, atol=1e-6)
