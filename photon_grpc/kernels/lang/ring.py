"""The barriers of a ring of steps in shared memory, which one warp fills and groups of warps read (sm_90)."""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import fence_async_shared, gl, gluon_jit, mbarrier


@gluon_jit
def begin_ring(NS: gl.constexpr, GROUPS: gl.constexpr):
    """Return the barriers of NS steps: of what is ready, by the fetching warp, and free, by all groups of warps."""
    ready = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NS):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    return ready, free
