"""The tiles of `wide16.py`, and which of them is fastest for a product."""

from __future__ import annotations

from typing import NamedTuple

from photon_grpc.kernels.lang.gluon import constexpr_function

#: Columns of a step; rows of W of a half of a group of warps and of both groups; rows of x that are copied at once if
#: not all are there.
STEP, GROUP_ROWS, ROWS, BOX = 64, 64, 128, 32


class WideTile16(NamedTuple):
    """Constants that the kernel is compiled for: BM and MORE rows of x, multiplied apart, and NS stages.

    HALVES of 64 rows of W a group of warps; of two, there is no MORE. IS_HANDED: programs have as many steps each
    (`handed.py`).
    """

    BM: int
    NS: int
    MORE: int = 0
    HALVES: int = 1
    IS_HANDED: bool = False

    @property
    def rows(self) -> int:
        """The rows of x."""
        return self.BM + self.MORE


@constexpr_function
def has_second(tile: WideTile16) -> bool:
    """Return whether a group of warps has two sums."""
    return tile.MORE > 0 or tile.HALVES == 2


#: (rows of W of gate and up, columns) -> most rows of x -> tile, where it was measured to be faster than `wgmma.py` and
#: the matrix library, products of their like in a row. More rows of x, and other weights, have those.
TABLE: dict[tuple[int, int], dict[int, WideTile16]] = {
    # Llama-3.1-8B
    (28672, 4096): {128: WideTile16(128, 6), 192: WideTile16(128, 5, MORE=64)},
    # Llama-3.2-1B, 3B
    (16384, 2048): {192: WideTile16(128, 5, MORE=64)},
    (16384, 3072): {128: WideTile16(128, 6), 192: WideTile16(128, 5, MORE=64)},
    # Qwen2.5-1.5B, 3B, 7B, 14B
    (17920, 1536): {64: WideTile16(64, 5, HALVES=2), 192: WideTile16(128, 5, MORE=64, IS_HANDED=True)},
    (22016, 2048): {64: WideTile16(64, 5, HALVES=2)},
    (37888, 3584): {192: WideTile16(128, 5, MORE=64, IS_HANDED=True)},
    (27648, 5120): {128: WideTile16(128, 4, HALVES=2), 192: WideTile16(128, 5, MORE=64, IS_HANDED=True)},
    # Qwen3-4B, 14B
    (19456, 2560): {64: WideTile16(64, 5, HALVES=2)},
    (34816, 5120): {192: WideTile16(128, 5, MORE=64, IS_HANDED=True)},
}
#: What steps of x are padded to there. With 160 rows the library is as fast or faster: no tile.
SIZES = (32, 64, 128, 160, 192)


def tile_of(rows: int, n: int, k: int) -> WideTile16 | None:
    """Return the tile that is faster than the other kernels; None: none is."""
    most = min((size for size in SIZES if size >= rows), default=0)
    return TABLE.get((n, k), {}).get(most)
