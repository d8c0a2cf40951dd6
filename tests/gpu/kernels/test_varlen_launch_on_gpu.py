"""Kernels of long prompts are loaded ahead: nothing is compiled or looked up for the prompt itself.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

import pytest
import torch
import triton

from photon_grpc.kernels.attention import gluon_decode, hopper_varlen
from tests.kernels.paged import Shape, paged_batch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(("window", "in_8_bits"), [(0, False), (100, False), (0, True)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_stand_ins_load_the_kernels_of_what_follows(
    head_dim: int, block_size: int, window: int, in_8_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is Hopper's")
    batch = paged_batch(
        Shape(32, 8, head_dim, block_size), [200, 37], [200, 301], torch.bfloat16, "cuda", window=window,
        in_8_bits=in_8_bits,
    )  # fmt: skip
    out = torch.empty(batch.q.shape, dtype=batch.q.dtype, device="cuda")
    found = gluon_decode.shape(4, batch.cache, window)
    hopper_varlen.preload.cache_clear()
    hopper_varlen.preload(batch.q.device, batch.q.dtype, found)
    loaded: list[object] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **told: loaded.append(told))
    for consumers in hopper_varlen.numbers_of_consumers(found):
        hopper_varlen.launch(batch.q, batch.cache, batch.layer, batch.meta, out, consumers=consumers)
    torch.cuda.synchronize()
    assert loaded == []
