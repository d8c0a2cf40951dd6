"""Starts `gemv.py` or `wgmma.py` for a tile."""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.gluon import has_dependent_launch
from photon_grpc.kernels.linear.gemv import gemv_kernel
from photon_grpc.kernels.linear.tiles import Tile, bucket
from photon_grpc.kernels.linear.wgmma import wgmma_kernel
from photon_grpc.kernels.sampling.best import SamplingMetadata

#: What only the rotary epilogue is given, and what only the draw is.
PAGED = ("pages", "cos", "sin", "positions", "slot_mapping", "block_stride")
DRAWING = (*SamplingMetadata._fields, "tops", "ids")


def launch(
    epilogue: str, tile: Tile, w: torch.Tensor, b: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor,
    counters: torch.Tensor | None, *, num_rows: int, eps: float | None = None, span: int = 0, guard: bool = False,
    **more: Any,
) -> None:  # fmt: skip
    """One of the two kernels; `guard`: x ends behind num_rows rows."""
    if not num_rows:
        return
    rows = bucket(num_rows)
    n, k = w.shape
    pdl = has_dependent_launch(w.device)
    arguments = dict.fromkeys((*PAGED, *DRAWING)) | dict.fromkeys(("Q_HEADS", "KV_HEADS", "BLOCK_SIZE"), 0) | more
    arguments |= {"w": w, "bias": b, "x": x, "y": y, "num_rows": num_rows, "eps": eps or 0.0}
    constants = {
        "EPILOGUE": epilogue,
        "N": n,
        "K": k,
        "SPAN": span,
        "NORM": eps is not None,
        "PDL": pdl,
        "BM": rows,
        "GUARD": guard,
    }
    constants |= {"BN": tile.BN, "BK": tile.BK, "KW": tile.KW, "NS": tile.NS, "num_warps": tile.KW}
    if pdl:
        constants["launch_pdl"] = True
    if tile.kind == "gemv":
        gemv_kernel[(n // tile.BN,)](**arguments, **constants)
        return
    splits, tiles = tile.SPLITS, n // tile.BN
    share = rows * (tile.BN + 1)
    partial = torch.empty(tiles * splits * share, dtype=torch.float32, device=w.device) if splits > 1 else None
    wgmma_kernel[(tiles, splits)](
        **arguments, **constants, partial=partial, counters=counters if splits > 1 else None, SPLITS=splits
    )
