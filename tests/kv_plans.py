"""Plans of models that keep one number per token and layer."""

from __future__ import annotations

from photon_grpc.core.kv import KVPlan, LayerKV, PageFormat, kv_groups


def kv_plan(block_size: int, *windows: int) -> KVPlan:
    """Of one layer for each window; of one that attends everything where none is said."""
    return KVPlan(kv_groups([LayerKV(PageFormat(1, 1, "float32"), window) for window in windows or (0,)]), block_size)
