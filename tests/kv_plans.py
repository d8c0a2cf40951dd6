"""Plans of models that keep one number per token and layer."""

from __future__ import annotations

from photon_grpc.core.kv import NEVER, KVPlan, LayerKV, PageFormat, kv_groups


def kv_plan(block_size: int, *windows: int, max_chunk: int = NEVER) -> KVPlan:
    """Of one layer for each window; of one that attends everything where none is said."""
    layers = [LayerKV(PageFormat(1, 1, "float32"), window) for window in windows or (0,)]
    return KVPlan(kv_groups(layers), block_size, max_chunk)
