"""Gluon kernel for attention of one query a row over paged keys; `decode_attention.py` has formula and launcher.

One program takes a share of the keys of one (row, key head), each of its KW warps BN of KW · BN keys a step: products have
rank 3 with the warps along the batch axis, so that a warp runs on its own until the warps' results are joined at the end. The
group of query heads is the (padded) 16-row operand.

The newest key and value come from the kernel before; they are taken from memory behind the programmatic wait, and the first
share starts its softmax with them. All older ones pass through a ring of NS steps, which with EARLY is filled before the
wait.
"""

from __future__ import annotations

from photon_grpc.kernels.parts.gluon import async_copy, gdc_launch_dependents, gdc_wait, gl, gluon_jit, mma_v2


@gluon_jit
def fetch(
    ks, vs, keys, table, step, begin, stop, block_stride,
    V_OFFSET: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BN: gl.constexpr, KW: gl.constexpr,
    NS: gl.constexpr, copy: gl.constexpr,
):  # fmt: skip
    """Starts the copies of KW · BN keys and values of one step; zeros from `stop` on."""
    warp = gl.arange(0, KW, layout=gl.SliceLayout(1, gl.SliceLayout(2, copy)))
    row = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, copy)))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, copy)))
    key = begin + (step * KW + warp[:, None, None]) * BN + row[None, :, None]
    page = gl.load(table + key // BLOCK_SIZE, mask=key < stop, other=0).to(gl.int64)
    at = keys + (page * block_stride + key % BLOCK_SIZE * HEAD_DIM) + column[None, None, :]
    inside = (key < stop) & (column >= 0)[None, None, :]
    async_copy.async_copy_global_to_shared(ks.index(step % NS), at, mask=inside)
    async_copy.async_copy_global_to_shared(vs.index(step % NS), at + V_OFFSET, mask=inside)


@gluon_jit
def join_shares(
    partial, partial_weight, place, num_shares, column, is_head,
    HEAD_DIM: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(acc [16, D], total [16]) over the shares' results in the order of their numbers, past the first-level cache."""
    high = gl.full([16], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([16], gl.float32, gl.SliceLayout(1, layout))
    acc = gl.zeros([16, HEAD_DIM], gl.float32, layout)
    for share in range(num_shares):
        weight = gl.load(partial_weight + place + share, mask=is_head, other=0.0, cache_modifier=".cg")
        at = partial + (place + share)[:, None] * HEAD_DIM + column[None, :]
        part = gl.load(at, mask=is_head[:, None], other=0.0, cache_modifier=".cg")
        top = gl.maximum(high, weight)
        shrink, factor = gl.exp2(high - top), gl.exp2(weight - top)
        acc = acc * shrink[:, None] + part * factor[:, None]
        total = total * shrink + factor
        high = top
    return acc, total


@gluon_jit
def decode_attention_kernel(
    q, pages, out, partial, partial_weight, counters, context_len, block_tables, scale, block_stride, table_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SPLITS: gl.constexpr, MIN_SHARE: gl.constexpr, BN: gl.constexpr, KW: gl.constexpr, NS: gl.constexpr,
    EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program for (row, key head, share of the keys). MIN_SHARE is a multiple of KW · BN."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[KW, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    TD: gl.constexpr = HEAD_DIM // 8
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // TD, TD], [KW, 1, 1], [2, 1, 0])
    swizzle: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    kind: gl.constexpr = q.dtype.element_ty
    STEP: gl.constexpr = KW * BN
    V_OFFSET: gl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    row, kv_head, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    # Lengths and tables are older than the kernel before, which began to write only when all before it was complete.
    older = gl.load(context_len + row) - 1
    share = gl.maximum(((older + SPLITS - 1) // SPLITS + STEP - 1) // STEP * STEP, MIN_SHARE)
    num_shares = gl.maximum((older + share - 1) // share, 1)
    begin = split * share
    stop = gl.minimum(begin + share, older)
    table = block_tables + row.to(gl.int64) * table_stride
    keys = pages + kv_head * (BLOCK_SIZE * HEAD_DIM)
    ks = gl.allocate_shared_memory(kind, [NS, KW, BN, HEAD_DIM], swizzle)
    vs = gl.allocate_shared_memory(kind, [NS, KW, BN, HEAD_DIM], swizzle)
    if not EARLY and PDL:
        gdc_wait()
    for s in gl.static_range(NS):
        if begin + s * STEP < stop:
            fetch(ks, vs, keys, table, s, begin, stop, block_stride, V_OFFSET, HEAD_DIM, BLOCK_SIZE, BN, KW, NS, copy)
        async_copy.commit_group()
    if PDL:
        if EARLY:
            gdc_wait()
        gdc_launch_dependents()
    if split < num_shares:
        member = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
        column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
        slices = gl.arange(0, KW, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))
        head = row * (KV_HEADS * GROUP) + kv_head * GROUP + member
        at = (slices * 0)[:, None, None] + head[None, :, None] * HEAD_DIM + column[None, None, :]
        tile = gl.load(q + at, mask=(member < GROUP)[None, :, None] & (column >= 0)[None, None, :], other=0.0)
        newest = keys + gl.load(table + older // BLOCK_SIZE).to(gl.int64) * block_stride + older % BLOCK_SIZE * HEAD_DIM
        new_key = gl.load(newest + column).to(gl.float32)
        score = gl.sum(tile.to(gl.float32) * new_key[None, None, :], 2) * scale
        score = gl.convert_layout(score, gl.SliceLayout(2, mma))
        dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))
        new_value = gl.load(newest + V_OFFSET + dim).to(gl.float32)
        warp = gl.arange(0, KW, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))
        has_newest = (warp == 0) & (split == 0)
        high = gl.where(has_newest[:, None], score, -float("inf"))
        total = gl.where(has_newest[:, None], score * 0.0 + 1.0, 0.0)
        acc = gl.zeros([KW, 16, HEAD_DIM], gl.float32, mma)
        acc = gl.where(has_newest[:, None, None], acc + new_value[None, None, :], 0.0)
        number = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))
        for i in range((stop - begin + STEP - 1) // STEP):
            async_copy.wait_group(NS - 1)
            scores = gl.zeros([KW, 16, BN], gl.float32, mma)
            scores = mma_v2(tile, ks.index(i % NS).permute([0, 2, 1]).load(right), scores) * scale
            key = begin + (i * KW + warp[:, None, None]) * BN + number[None, None, :]
            scores = gl.where(key < stop, scores, -float("inf"))
            top = gl.maximum(high, gl.max(scores, 2))
            # A warp that has seen no key yet has no maximum to subtract.
            base = gl.where(top == -float("inf"), 0.0, top)
            p = gl.exp2(scores - base[:, :, None])
            shrink = gl.exp2(high - base)
            total = total * shrink + gl.sum(p, 2)
            acc = acc * shrink[:, :, None]
            acc = mma_v2(gl.convert_layout(p.to(kind), left), vs.index(i % NS).load(right), acc)
            high = top
            if begin + (i + NS) * STEP < stop:
                fetch(
                    ks, vs, keys, table, i + NS, begin, stop, block_stride,
                    V_OFFSET, HEAD_DIM, BLOCK_SIZE, BN, KW, NS, copy,
                )  # fmt: skip
            async_copy.commit_group()
        store_share(
            high, total, acc, out, partial, partial_weight, counters, row, kv_head, split, num_shares,
            KV_HEADS, GROUP, HEAD_DIM, SPLITS, mma,
        )  # fmt: skip


@gluon_jit
def store_share(
    high, total, acc, out, partial, partial_weight, counters, row, kv_head, split, num_shares,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SPLITS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Joins the warps, and where there are several shares those, once the last has arrived."""
    layout: gl.constexpr = gl.SliceLayout(0, mma)
    top = gl.max(high, 0)
    factor = gl.exp2(high - top[None, :])
    total = gl.convert_layout(gl.sum(total * factor, 0), gl.SliceLayout(1, layout))
    top = gl.convert_layout(top, gl.SliceLayout(1, layout))
    acc = gl.sum(acc * factor[:, :, None], 0)
    member = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    is_head = member < GROUP
    head = row * (KV_HEADS * GROUP) + kv_head * GROUP + member
    to = out + head[:, None] * HEAD_DIM + column[None, :]
    kind: gl.constexpr = out.dtype.element_ty
    if SPLITS == 1:
        gl.store(to, (acc / total[:, None]).to(kind), mask=is_head[:, None])
    else:
        if num_shares == 1:
            gl.store(to, (acc / total[:, None]).to(kind), mask=is_head[:, None])
        else:
            place = head * SPLITS
            at = partial + (place + split)[:, None] * HEAD_DIM + column[None, :]
            gl.store(at, acc / total[:, None], mask=is_head[:, None])
            gl.store(partial_weight + place + split, top + gl.log2(total), mask=is_head)
            gl.thread_barrier()
            counter = counters + row * KV_HEADS + kv_head
            if gl.atomic_add(counter, 1, sem="acq_rel") == num_shares - 1:
                gl.store(counter, 0)
                sums, weight = join_shares(
                    partial, partial_weight, place, num_shares, column, is_head, HEAD_DIM, layout
                )
                gl.store(to, (sums / weight[:, None]).to(kind), mask=is_head[:, None])
