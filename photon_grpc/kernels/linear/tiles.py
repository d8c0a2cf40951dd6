"""Ways to multiply a weight of a given shape with few rows.

The table has those of two models and some that were timed in layers where the cost model is wrong; `cost.py` chooses
all others.

The matrix library, with the kernels that it needs beside it, was faster where the table has None and for more rows than
the largest bucket.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from photon_grpc.kernels.lang.gluon import constexpr_function
from photon_grpc.kernels.linear import wide16_tiles
from photon_grpc.kernels.linear.cut import GRAIN, slice_columns
from photon_grpc.kernels.linear.weight import WeightKind


class Tile(NamedTuple):
    """One way to multiply: by the kernel of the file of its kind.

    BN rows of W and BK columns of a slice of K a step, KW warps, NS steps in flight. In gemv each slice has KW / slices
    of the warps; in wgmma a program has one slice, and with BN below 64 x is the operand of 64 rows. Of wide16 there is
    WIDE16.
    """

    kind: Literal["gemv", "wgmma", "wide16"]
    BN: int
    BK: int
    KW: int
    NS: int


#: Products whose rows of W and of x are fetched by the bulk copy engine; ends take 64 rows of W, and four warps.
WIDE16 = Tile("wide16", 64, 64, 4, 0)


class HeadSplit(NamedTuple):
    """The rows of W of a projection to queries, keys and values, and how pages hold the latter."""

    Q: int
    KV: int
    BLOCK_SIZE: int


class Problem(NamedTuple):
    """The sizes that a kernel is compiled for: W [N, K] and BM rows of x.

    SPAN: the distance of W's paired rows; 0 if they are not paired. GUARD: x ends after its rows, which may be fewer
    than BM. SLICES: of K (cut.py). WEIGHT: how W is stored.
    """

    N: int
    K: int
    BM: int
    SPAN: int = 0
    GUARD: bool = False
    HEADS: HeadSplit | None = None
    SLICES: int = 1
    WEIGHT: WeightKind = WeightKind()


@constexpr_function
def with_rows(problem: Problem, rows: int) -> Problem:
    """Return the constants of an end of so many rows of x."""
    return problem._replace(BM=rows)


#: Rows of x are padded to one of these.
BUCKETS = (8, 16, 32, 64, 128)
#: Bytes of shared memory that a program's steps in flight may take on sm_90.
SHARED_BYTES = 200_000
#: Bytes that a program takes beside them, for exchanging sums between threads.
EXCHANGE_BYTES = 32_448
#: Registers of a thread that two parts of a step of gemv may have, without pairs of rows in the end and with them.
PART_REGISTERS = 128, 96

#: (rows of W, columns of W) -> bucket -> tile, and WIDE16 where `wide16_tiles.TABLE` has a tile.
TABLE: dict[tuple[int, int], dict[int, Tile | None]] = {
    # Llama-3.2-1B: qkv
    (3072, 2048): {
        8: Tile("gemv", 32, 128, 4, 6),
        16: Tile("gemv", 32, 256, 4, 3),
        32: Tile("gemv", 32, 128, 4, 4),
        64: Tile("wgmma", 64, 128, 4, 6),
        128: None,
    },
    # output
    (2048, 2048): {
        8: Tile("gemv", 32, 256, 2, 8),
        16: Tile("gemv", 32, 128, 2, 12),
        32: Tile("wgmma", 32, 128, 4, 8),
        64: Tile("wgmma", 32, 128, 4, 8),
        128: None,
    },
    # gate and up
    (16384, 2048): {
        8: Tile("gemv", 64, 128, 4, 6),
        16: Tile("gemv", 64, 128, 4, 5),
        32: Tile("wgmma", 64, 64, 4, 8),
        64: Tile("wgmma", 128, 64, 4, 8),
        128: Tile("wgmma", 128, 64, 8, 6),
    },
    # down
    (2048, 8192): {
        8: Tile("gemv", 16, 256, 2, 7),
        16: Tile("gemv", 16, 256, 2, 5),
        32: Tile("wgmma", 32, 128, 4, 8),
        64: Tile("wgmma", 32, 128, 4, 8),
        128: None,
    },
    # Llama-3.1-8B: qkv
    (6144, 4096): {
        8: Tile("gemv", 32, 128, 2, 10),
        16: Tile("wgmma", 64, 128, 4, 8),
        32: Tile("wgmma", 64, 128, 4, 8),
        64: Tile("wgmma", 64, 64, 4, 10),
        128: None,
    },
    # output
    (4096, 4096): {
        8: Tile("gemv", 32, 256, 2, 8),
        16: Tile("gemv", 16, 256, 1, 6),
        32: Tile("wgmma", 32, 128, 4, 8),
        64: Tile("wgmma", 32, 128, 4, 8),
        128: None,
    },
    # gate and up
    (28672, 4096): {
        8: Tile("gemv", 32, 256, 2, 8),
        16: Tile("wgmma", 64, 128, 4, 5),
        32: Tile("wgmma", 64, 128, 4, 8),
        64: Tile("wgmma", 128, 64, 8, 8),
    },
    # down
    (4096, 14336): {
        8: Tile("gemv", 16, 256, 1, 9),
        16: Tile("gemv", 16, 256, 1, 6),
        32: Tile("wgmma", 32, 128, 4, 8),
        64: Tile("wgmma", 32, 128, 4, 8),
        128: None,
    },
    # Gemma-3-1B: gate and up, down; 4B: output, gate and up, down
    (13824, 1152): {8: Tile("gemv", 32, 128, 1, 4)},
    (1152, 6912): {8: Tile("gemv", 16, 128, 2, 16), 64: None},
    (2560, 2048): {8: Tile("gemv", 16, 256, 1, 5)},
    (20480, 2560): {8: Tile("gemv", 64, 128, 2, 3), 64: Tile("wgmma", 64, 64, 4, 4)},
    (2560, 10240): {8: Tile("gemv", 32, 128, 4, 9), 64: None},
    # Qwen2.5-32B: down, where no tile that the model of cost considers comes near the library.
    (5120, 27648): {16: None},
    # Llama-3.2-3B: output, down
    (3072, 3072): {8: Tile("gemv", 16, 256, 1, 9)},
    (3072, 8192): {8: Tile("gemv", 16, 256, 2, 4), 32: Tile("gemv", 32, 128, 4, 4)},
    # Qwen2.5-7B
    (4608, 3584): {16: Tile("wgmma", 64, 128, 4, 8)},
    (3584, 3584): {8: Tile("gemv", 16, 256, 1, 9)},
    (37888, 3584): {16: Tile("wgmma", 64, 128, 4, 8)},
    (3584, 18944): {8: Tile("gemv", 16, 256, 1, 9)},
    # Qwen3-8B: gate and up, down
    (24576, 4096): {64: Tile("wgmma", 64, 64, 4, 4)},
    (4096, 12288): {8: Tile("gemv", 16, 256, 1, 8)},
    # Qwen3-0.6B: output, gate and up, down
    (1024, 2048): {8: Tile("gemv", 32, 256, 2, 8)},
    (6144, 1024): {8: Tile("gemv", 32, 128, 2, 10)},
    (1024, 3072): {64: Tile("wgmma", 64, 128, 4, 6)},
    # Heads of Llama-3.2-3B and of Qwen3-0.6B, for which the model of cost considers too few sizes.
    (128256, 3072): {
        8: Tile("gemv", 64, 256, 2, 2),
        16: Tile("wgmma", 128, 64, 4, 8),
    },
    (151936, 1024): {
        8: Tile("gemv", 64, 256, 2, 2),
        16: Tile("wgmma", 128, 64, 4, 8),
        64: Tile("wgmma", 128, 64, 8, 8),
    },
    # Llama-3: head
    (128256, 2048): {
        8: Tile("gemv", 64, 256, 2, 2),
        16: Tile("wgmma", 64, 64, 4, 10),
        32: Tile("wgmma", 64, 64, 4, 6),
        64: Tile("wgmma", 128, 64, 8, 8),
        128: Tile("wgmma", 128, 64, 8, 6),
    },
    (128256, 4096): {
        8: Tile("gemv", 64, 256, 2, 2),
        16: Tile("wgmma", 64, 128, 4, 5),
        32: Tile("wgmma", 128, 64, 4, 8),
        64: Tile("wgmma", 128, 64, 8, 8),
        128: Tile("wgmma", 128, 64, 8, 6),
    },
}
for _weight, _by_rows in wide16_tiles.TABLE.items():
    for _rows in _by_rows:
        if _rows in BUCKETS:
            TABLE.setdefault(_weight, {})[_rows] = WIDE16

#: The same of products whose heads are normalised: of Gemma-3-1B and 4B.
NORMED_TABLE: dict[tuple[int, int], dict[int, Tile | None]] = {
    (1536, 1152): {64: Tile("wgmma", 64, 128, 4, 5)},
    (4096, 2560): {8: Tile("gemv", 16, 256, 1, 5)},
}

#: (rows of W, columns of W, bits) -> bucket -> tile of packed weights.
PACKED_TABLE: dict[tuple[int, int, int], dict[int, Tile | None]] = {
    # Llama-3.1-8B: output, gate and up, down, qkv
    (4096, 4096, 8): {8: Tile("gemv", 32, 256, 4, 5)},
    (4096, 4096, 4): {8: Tile("gemv", 64, 256, 8, 7), 16: Tile("gemv", 32, 256, 4, 4)},
    (28672, 4096, 4): {8: Tile("gemv", 128, 256, 8, 4)},
    (4096, 14336, 8): {8: Tile("gemv", 16, 256, 2, 6)},
    (4096, 14336, 4): {8: Tile("gemv", 32, 256, 8, 5), 16: Tile("wgmma", 64, 256, 4, 6)},
    (6144, 4096, 4): {8: Tile("gemv", 16, 256, 2, 4), 64: Tile("wgmma", 64, 128, 4, 5)},
    # Llama-3.1-70B: qkv, output, gate and up, down
    (10240, 8192, 4): {8: Tile("gemv", 32, 512, 4, 2)},
    (8192, 8192, 4): {8: Tile("gemv", 32, 256, 4, 5)},
    (57344, 8192, 4): {8: Tile("gemv", 64, 256, 4, 4)},
    (8192, 28672, 4): {8: Tile("gemv", 64, 512, 8, 3)},
}


def bucket(num_rows: int) -> int | None:
    """Return the smallest bucket that holds num_rows; None above them all."""
    return next((size for size in BUCKETS if size >= num_rows), None)


@constexpr_function
def stored_width(bits: int, columns: int) -> int:
    """Return the elements in memory of this many columns of W: bytes where it is packed."""
    return columns if bits == 16 else columns * bits // 8


@constexpr_function
def num_pieces(group: int, bk: int, k: int, slices: int) -> int:
    """Return the pieces of a step that have a scale: slices begin at multiples of 64, not of a group."""
    if not group:
        return 1
    is_aligned = slices == 1 or slice_columns(k, slices) % group == 0
    return bk // min(bk, group if is_aligned else GRAIN)


@constexpr_function
def operand_registers(bn: int, bk: int, rows: int, warps: int) -> int:
    """Return the registers of a thread in which gemv has a step of W and of x, by the warps of a slice."""
    return bk * (bn // warps + rows) // 64


@constexpr_function
def num_parts(bk: int, registers: int, has_pairs: bool) -> int:
    """Return the parts in which gemv multiplies a step of so many registers: two are in registers at a time."""
    return 4 if bk >= 128 and registers > PART_REGISTERS[has_pairs] else 2


def step_bytes(tile: Tile, weight: WeightKind, k: int, slices: int) -> int:
    """Return the bytes of a step of W with what stands beside it, in one slice."""
    size = tile.BN * tile.BK * weight.BITS // 8
    if weight.GROUP:
        size += 2 * tile.BN * num_pieces(weight.GROUP, tile.BK, k, slices) * (1 + weight.HAS_ZEROS)
    return size + 2 * tile.BK * weight.HAS_NORM


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Return the bytes of NS steps of W and of x, which has 16 bits."""
    of_w = step_bytes(tile, problem.WEIGHT, problem.K, problem.SLICES)
    rows = 64 if tile.kind == "wgmma" and tile.BN < 64 else problem.BM
    return tile.NS * (problem.SLICES if tile.kind == "gemv" else 1) * (of_w + 2 * tile.BK * rows)


def pipeline_bytes(shared_bytes_per_program: int) -> int:
    """Return the bytes left for steps in flight if a program has this many: 227 KiB on sm_90, 99 on sm_89."""
    return min(SHARED_BYTES, shared_bytes_per_program - EXCHANGE_BYTES)


def num_steps(tile: Tile, k: int, slices: int) -> int:
    """Return the steps over a slice of K."""
    return slice_columns(k, slices) // tile.BK


def fits(tile: Tile, problem: Problem, max_bytes: int = SHARED_BYTES) -> bool:
    """Return whether a tile divides the problem's W, slices and pairs, and fits into shared memory."""
    n, k, _, span = problem[:4]
    slices = problem.SLICES
    # Rows of W and of x are copied 16 bytes at a time.
    columns_of_16_bytes = 128 // problem.WEIGHT.BITS
    divides = (
        n % tile.BN == 0
        and k % columns_of_16_bytes == 0
        and k % max(1, problem.WEIGHT.GROUP) == 0
        and slice_columns(k, slices) % tile.BK == 0
        and (span == 0 or span % (tile.BN // 2) == 0)
    )
    if tile.kind == "gemv":
        # Each warp of a slice has at least the 16 rows of one product.
        divides = divides and tile.KW % slices == 0 and tile.BN * slices >= 16 * tile.KW
    elif tile.BN < 64:
        divides = divides and problem.BM in (16, 32, 64) and problem.WEIGHT.BITS == 16
    # The compiler of Triton 3.6 fails on a loop of a single step.
    has_steps = num_steps(tile, k, slices) >= 2
    return divides and has_steps and shared_bytes(tile, problem) <= max_bytes


def holds_heads(tile: Tile, span: int) -> bool:
    """Return whether every program of the tile has whole pairs at distance `span`, all of one head."""
    return span % (tile.BN // 2) == 0
