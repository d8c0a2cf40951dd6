"""Sampling noise: the published generator, the same noise in any batch, and the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from photon_grpc.kernels.sampling import noise, topk_topp
from photon_grpc.kernels.sampling.noise import philox4x32

ONES = 0xFFFFFFFF
# Random123's known answers for philox4x32-10: counter, key, words.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
# Seeds whose high bit, high word or low word matters, as int64 bit patterns.
SEEDS = [0, 1, -1, 2**40 + 5, -(2**63), 0x299F31D0A4093822]


def test_no_rounding_makes_a_token_out_of_range_equal_to_the_best() -> None:
    """Rows without filters are sampled with noise for all ids, or for those in range: both give the same id."""
    least, most = np.float32(noise.MIN_GUMBEL), np.float32(noise.MAX_GUMBEL)
    least, most = np.nextafter(least, np.float32(-np.inf)), np.nextafter(most, np.float32(np.inf))
    best = np.ldexp(np.linspace(1, 2, 257, dtype=np.float32)[:-1, None], np.arange(-10, 31))
    best = np.concatenate([-best, best])
    other = np.nextafter(best - np.float32(topk_topp.SIZES.RANGE), np.float32(-np.inf))
    assert (other + most < best + least).all()


def word_0(seed: int, position: int, output_index: int, token: int) -> int:
    """Return the first word from the published recurrence, in Python's unbounded integers."""
    c = [token, position, output_index, 0]
    k = [seed & ONES, seed >> 32 & ONES]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & ONES, a >> 32 ^ c[3] ^ k[1], a & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c[0]


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = len(SEEDS)
    return torch.tensor(SEEDS), torch.arange(count) * 1000 + 7, torch.arange(count) % 3


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_vectors(counter: list[int], key: list[int], words: list[int]) -> None:
    as_numpy = [np.array([word], dtype=np.uint64) for word in counter + key]
    as_torch = [torch.tensor([word]) for word in counter + key]
    assert [int(word[0]) for word in philox4x32(*as_numpy)] == words
    assert [int(word[0]) for word in philox4x32(*as_torch)] == words


def test_bits_are_those_of_the_recurrence() -> None:
    seed, position, output_index = rows()
    tokens = torch.tensor([[0, 1, 17, 128255, 2**31 - 1]]).expand(len(SEEDS), -1)
    bits = noise.uniform_bits(seed, position, output_index, tokens)
    for row, seed_value in enumerate(SEEDS):
        for column, token in enumerate(tokens[row].tolist()):
            assert bits[row, column] == word_0(seed_value, int(position[row]), int(output_index[row]), token)


def test_noise_is_the_double_logarithm_of_the_bits() -> None:
    seed, position, output_index = rows()
    bits = noise.uniform_bits(seed, position, output_index, 40_000).double()
    want = -(-(((bits / 512).floor() + 0.5) / 2**23).log()).log()
    got = noise.reference(seed, position, output_index, 40_000)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_a_subset_of_tokens_in_a_batch_has_the_same_noise_as_the_whole_vocabulary_alone() -> None:
    seed, position, output_index = rows()
    kept = torch.randint(0, 30_000, (len(SEEDS), 37))
    together = noise.reference(seed, position, output_index, kept)
    for row in range(len(SEEDS)):
        one = slice(row, row + 1)
        alone = noise.reference(seed[one], position[one], output_index[one], 30_000)
        assert torch.equal(alone[0, kept[row]], together[row])


def test_no_noise_is_infinite_and_the_bounds_hold() -> None:
    extremes = torch.tensor([0, ONES])
    low, high = noise._gumbel(extremes).tolist()
    assert low == pytest.approx(noise.MIN_GUMBEL, abs=1e-6)
    assert high == pytest.approx(noise.MAX_GUMBEL, abs=1e-6)
    assert math.isfinite(low)
    assert math.isfinite(high)


def test_argmax_with_noise_samples_the_softmax() -> None:
    probability = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    num_samples = 20_000
    seed = torch.full((num_samples,), 1234)
    sampled = noise.reference(seed, torch.arange(num_samples), torch.zeros(num_samples, dtype=torch.long), 5)
    counts = torch.bincount((probability.log() + sampled).argmax(-1), minlength=5)
    chi_square = ((counts - num_samples * probability) ** 2 / (num_samples * probability)).sum()
    assert chi_square < 18.5  # one seed in a thousand would be above, and this one is fixed
