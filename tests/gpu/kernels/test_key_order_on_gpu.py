"""An answer has the same bits by the decode kernel with any tile, in any batch, and by the prompt kernel in any chunk.

`python -m benchmarks.kernels.attention_bits` compares more shapes and contexts, and prints a table.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.attention_bits import Differences, Sequence, compare_context, compare_every_position

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [(32, 8, 64), (32, 8, 128), (15, 5, 64), (8, 4, 256)], ids=str)
def test_an_answer_has_the_same_bits_by_every_way(
    heads: tuple[int, int, int], block_size: int, window: int, in_8_bits: bool
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the prompt kernel is Hopper's")
    found = Differences()
    sequence = Sequence(heads, block_size, 2100, window, in_8_bits=in_8_bits)
    for context in (1, 2, 65, 272, 512, 513, 1025, 2100):
        compare_context(sequence, f"context {context}", context, found, tiles=True)
    compare_every_position(sequence, "2,100 queries", found)
    errors = found.counts.pop("error against float32")
    assert errors.most < 2e-2
    assert {way: count for way, count in found.counts.items() if count.different} == {}
