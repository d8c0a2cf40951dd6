"""Random projections of a decode step and their results in float64, written out head by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import tiles
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.fused_linear import Affine, ResidualStream
from photon_grpc.kernels.rotary.rotate_store import Norms, Rotation

EPS = 1e-5
LAYER = 1


@dataclass(frozen=True)
class Sizes:
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    block_size: int = 16


def stream(h: torch.Tensor) -> ResidualStream:
    """Return h with the sums of its squares, with NaN in the memory of the rest of the bucket."""
    whole = torch.full((tiles.bucket(h.shape[0]), h.shape[1] // squares.GROUP), torch.nan, device=h.device)
    whole[: h.shape[0]] = squares.reference(h)
    return ResidualStream(h, whole[: h.shape[0]])


def padded(rows: int, size: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> torch.Tensor:
    """Return random [rows, size], with NaN in the memory of the rest of the bucket."""
    whole = torch.full((tiles.bucket(rows) or rows, size), torch.nan)
    whole[:rows] = torch.randn((rows, size), generator=generator) * 2
    return whole.to(dtype).to(device)[:rows]


class Problem:
    """One projection: x [rows, K], W, bias, and for q, k and v positions, slots, tables and a cache full of NaN."""

    def __init__(
        self, n: int, k: int, rows: int, dtype: torch.dtype, device: str, *, bias: bool = False, seed: int = 0
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.dtype, self.device = rows, dtype, device
        self.x = padded(rows, k, dtype, device, self.generator)
        self.w = self.random(n, k) * k**-0.5
        self.b = self.random(n) if bias else None
        self.linear = Affine(self.w, self.b, num_slices(n, k))
        self.counters = torch.zeros(max(n // 16, 1), dtype=torch.int32, device=device)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def normed(self) -> torch.Tensor:
        """Return W · x / rms(x) + b in float64 on the CPU."""
        return self.product(self.x.double().cpu() * (self.x.double().cpu().square().mean(-1, True) + EPS).rsqrt())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y = x.double().cpu() @ self.w.double().cpu().T
        return y if self.b is None else y + self.b.double().cpu()

    def cache(self, sizes: Sizes) -> torch.Tensor:
        shape = (self.rows + 3, 3, 2, sizes.kv_heads, sizes.block_size, sizes.head_dim)
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def rotation(self, sizes: Sizes) -> Rotation:
        """Return a rotation with every token in a separate block; block 0 belongs to no token."""
        angles = torch.rand((64, sizes.head_dim // 2), generator=self.generator) * 6
        blocks = torch.randperm(self.rows + 2, generator=self.generator)[: self.rows] + 1
        offsets = torch.randint(0, sizes.block_size, (self.rows,), generator=self.generator)
        return Rotation(
            angles.cos().to(self.device),
            angles.sin().to(self.device),
            torch.randint(0, 64, (self.rows,), generator=self.generator).to(self.device),
            (blocks * sizes.block_size + offsets).to(self.device),
        )

    def expected_swiglu(self) -> torch.Tensor:
        gate, up = self.normed().chunk(2, dim=-1)
        return gate / (1 + (-gate).exp()) * up

    def expected_qkv(
        self, sizes: Sizes, rotation: Rotation, norms: Norms | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (q [rows, Hq · D], the cache with every token's keys and values at its slot)."""
        cache = self.cache(sizes).double().cpu()
        heads = self.normed().view(self.rows, -1, sizes.head_dim)
        first = 0
        for count, weight in zip((sizes.q_heads, sizes.kv_heads), norms or (), strict=False):
            part = heads[:, first : first + count]
            part *= (part.square().mean(-1, True) + EPS).rsqrt() * weight.double().cpu()
            first += count
        half = sizes.head_dim // 2
        for token, slot in enumerate(rotation.slot_mapping.tolist()):
            position = rotation.positions[token].item()
            cos, sin = rotation.cos[position].double().cpu(), rotation.sin[position].double().cpu()
            for head in heads[token, : sizes.q_heads + sizes.kv_heads]:
                a, b = head[:half].clone(), head[half:].clone()
                head[:half], head[half:] = a * cos - b * sin, b * cos + a * sin
            stored = heads[token, sizes.q_heads :].view(2, sizes.kv_heads, sizes.head_dim)
            cache[slot // sizes.block_size, LAYER, :, :, slot % sizes.block_size] = stored
        return heads[:, : sizes.q_heads].reshape(self.rows, -1), cache


def assert_near(mine: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, roundings: int = 1) -> None:
    """Check the relative error of the whole, as roundings leave it; NaN exactly where expected."""
    mine = mine.double().cpu()
    assert torch.equal(mine.isnan(), expected.isnan())
    mine, expected = mine.nan_to_num(), expected.nan_to_num()
    tolerance = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-5}[dtype]
    assert (mine - expected).norm() <= roundings * tolerance * expected.norm()
