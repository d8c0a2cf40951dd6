"""Write new keys and values into their pages of the KV cache.

    cache[slot // block_size, layer, 0, :, slot % block_size] = k[t],  slot = slot_mapping[t];  v[t] at index 1

Shapes: k, v [T, Hkv, D] (tokens may be strided), cache [num_blocks, layers, 2, Hkv, block_size, D] contiguous and of
the dtype of k, or of 8 bits with PageScales (one block of all layers is one run of memory), slot_mapping [T] int64 =
block · block_size + offset.
Slots may be equal only in block 0, where padding goes and which is never read.
Bytes moved: 4 · T · Hkv · D · itemsize.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.jit import jit, launches, next_power_of_2, tl
from photon_grpc.kernels.lang.page_scales import PageScales, page_numbers, quantized


def reference(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    scales: PageScales | None = None,
) -> None:
    """Write keys and values in torch: changes cache."""
    block_size = cache.shape[4]
    block = slot_mapping // block_size
    given = stored(k, v, slot_mapping, block_size, scales)
    _bytes(cache)[:, layer][block, :, :, slot_mapping - block * block_size] = given


def rows(slot_mapping: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return int64 [T · 2 · Hkv]: rows of head_dim that `write_rows` fills in a layer, counted from its first."""
    _, layers, planes, kv_heads, block_size, _ = cache.shape
    block = slot_mapping // block_size
    first = block * ((layers * planes * kv_heads - 1) * block_size) + slot_mapping
    head = torch.arange(planes * kv_heads, device=slot_mapping.device) * block_size
    return (first[:, None] + head).view(-1)


def layer_rows(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return [rows, D] for every layer: the cache from the layer's first row of head_dim on, indexed by `rows`.

    Those of 8 bits are bytes.
    """
    num_blocks, layers, planes, kv_heads, block_size, head_dim = cache.shape
    size = planes * kv_heads * block_size
    num_rows = ((num_blocks - 1) * layers + 1) * size
    return (
        _bytes(cache)
        .view(-1, head_dim)
        .as_strided((layers, num_rows, head_dim), (size * head_dim, head_dim, 1))
        .unbind(0)
    )


def stored(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, block_size: int, scales: PageScales | None
) -> torch.Tensor:
    """Return keys and values [T, 2, Hkv, D] as pages hold them, those of 8 bits as bytes."""
    paired = _paired(k, v)
    return paired if scales is None else _bytes(quantized(paired, scales, slot_mapping, block_size))


def write_rows(given: torch.Tensor, layer: torch.Tensor, places: torch.Tensor) -> None:
    """Write what `stored` returns in torch to one of `layer_rows`, at the `rows` of a step."""
    layer.index_copy_(0, places, given.reshape(-1, layer.shape[1]))


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of 8 bits as bytes, which more operations take; others as they are."""
    return numbers.view(torch.uint8) if numbers.itemsize == 1 else numbers


def _paired(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return [T, 2, Hkv, D]; a view where v follows k in memory, as it does in one projection's output."""
    num_tokens, num_heads, size = k.shape
    follows = v.data_ptr() == k.data_ptr() + num_heads * size * k.element_size()
    if not follows or k.stride() != v.stride() or k.stride(1) != size:
        return torch.stack((k, v), dim=1)
    return k.as_strided((num_tokens, 2, num_heads, size), (k.stride(0), num_heads * size, size, 1))


@jit
def write_kv_kernel(
    k, v, pages, slot_mapping, scales, k_stride, v_stride, block_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write one token per program; `pages` points at the layer's part of block 0. scales: PageScales or None."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    element = tl.arange(0, SIZE_PAD)
    inside = element < HEADS * HEAD_DIM
    head, column = element // HEAD_DIM, element % HEAD_DIM
    place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD_DIM
    to = pages + place + head * (BLOCK_SIZE * HEAD_DIM) + column
    key = tl.load(k + token * k_stride + element, mask=inside)
    value = tl.load(v + token * v_stride + element, mask=inside)
    if scales is not None:
        counted = inside & (slot >= BLOCK_SIZE)
        inverse = tl.load(scales.inverse + head, mask=inside, other=1.0)
        key = key.to(tl.float32)
        if scales.offset is not None:
            key = key - tl.load(scales.offset + element, mask=inside, other=0.0)
        key = page_numbers(key, inverse, scales.saturated, counted)
        inverse = tl.load(scales.inverse + HEADS + head, mask=inside, other=1.0)
        value = page_numbers(value.to(tl.float32), inverse, scales.saturated, counted)
    tl.store(to, key.to(pages.dtype.element_ty), mask=inside)
    tl.store(to + HEADS * BLOCK_SIZE * HEAD_DIM, value.to(pages.dtype.element_ty), mask=inside)


def config(heads: int, head_dim: int, block_size: int) -> dict[str, Any]:
    """Return the compile-time arguments for one token's keys."""
    size_pad = next_power_of_2(heads * head_dim)
    return {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "SIZE_PAD": size_pad,
        "BLOCK_SIZE": block_size,
        "num_warps": max(1, min(8, size_pad // 256)),
    }


def launch(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    scales: PageScales | None = None,
) -> None:
    """Change cache; heads of k and v are contiguous within a token."""
    if not launches(k):
        return reference(k, v, cache, layer, slot_mapping, scales)
    if k.shape[0]:
        meta = config(k.shape[1], k.shape[2], cache.shape[4])
        strides = k.stride(0), v.stride(0), cache.stride(0)
        write_kv_kernel[(k.shape[0],)](k, v, cache[:, layer], slot_mapping, scales, *strides, **meta)
    return None
