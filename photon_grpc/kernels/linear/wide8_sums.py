"""The sums of `wide8.py`: the ring of steps that one warp fetches, and the products of one group of four warps."""

from __future__ import annotations

from typing import Any

from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@constexpr_function
def box_layout(rank: int) -> Any:
    """Return the layout of copied values in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=rank)


@constexpr_function
def sums_layout(halves: int) -> Any:
    """Return the layout of a group's sums [64, 64 · halves] in registers: rows of x, then rows of W."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64 * halves, 32])


@constexpr_function
def scale_layout() -> Any:
    """Return the layout of copied scales in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon_jit
def num_x_tiles(num_rows, W: gl.constexpr):
    """Return the tiles along x."""
    return (num_rows + W.PARTS * 128 - 1) // (W.PARTS * 128)


@gluon_jit
def place_of(number, x_tiles, N_TILES: gl.constexpr):
    """Return the number of a tile along W and along x: bands of eight along x, in which all of W is read once."""
    band = number // (8 * N_TILES)
    width = gl.minimum(x_tiles - band * 8, 8)
    within = number % (8 * N_TILES)
    return within // width, band * 8 + within % width


@gluon_jit
def fetch_w(w, ring, n_tile, step, stage, P: gl.constexpr, W: gl.constexpr):
    """Begin the copies of a step's rows of W to a stage, and say how many bytes it gets, with those of x."""
    ws = ring[0]
    HALVES: gl.constexpr = W.HALVES
    BYTES: gl.constexpr = 128 * (64 * W.HALVES + 128 * W.PARTS) + (512 * W.PARTS if W.BLOCKS else 0)
    at = ring[3].index(stage)
    mbarrier.expect(at, BYTES)
    for half in gl.static_range(HALVES):
        to = ws.index(stage * W.HALVES + half)
        if P.SPAN == 0:
            tma.async_copy_global_to_shared(w, [(n_tile * W.HALVES + half) * 64, step * 128], at, to)
        else:
            pair = (n_tile * W.HALVES + half) * 32
            pairs = to._reinterpret(to.dtype, [1, 4, 2, 8, 128], box_layout(5))
            tma.async_copy_global_to_shared(w, [pair // P.SPAN, pair % P.SPAN // 8, 0, 0, step * 128], at, pairs)


@gluon_jit
def fetch_x(sources, ring, place, step, stage, W: gl.constexpr):
    """Begin the copies of a step's rows of x to a stage, and of their scales. place: the tile of x, the last 128 rows.

    A tile with 128 rows more than there are gets the last ones again: a copy that reaches beyond x is slow.
    """
    x_tile, last = place
    _, x, x_scale = sources
    _, xs, sxs, ready, _ = ring
    PARTS: gl.constexpr = W.PARTS
    of_x = xs._reinterpret(xs.dtype, [W.NS * W.PARTS, 128, 128], box_layout(2))
    at = ready.index(stage)
    for part in gl.static_range(PARTS):
        token = gl.minimum((x_tile * W.PARTS + part) * 128, last)
        tma.async_copy_global_to_shared(x, [token, step * 128], at, of_x.index(stage * W.PARTS + part))
        if W.BLOCKS:
            tma.async_copy_global_to_shared(x_scale, [step, token], at, sxs.index(stage * W.PARTS + part))


@gluon_jit
def produce(sources, ring, num_rows, P: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr):
    """Fetch the tiles of this program, step by step: the program of the fetching warp.

    W depends on no kernel: as many steps of it as there are stages are fetched before the programmatic wait.
    """
    w = sources[0]
    free = ring[4]
    STEPS: gl.constexpr = (P.K + 127) // 128
    N_TILES: gl.constexpr = P.N // (64 * W.HALVES)
    AHEAD: gl.constexpr = min(W.NS, STEPS)
    x_tiles = num_x_tiles(num_rows, W)
    last = (num_rows - 1) // 128 * 128
    n_tile, x_tile = place_of(gl.program_id(0), x_tiles, N_TILES)
    for step in range(AHEAD):
        fetch_w(w, ring, n_tile, step, step, P, W)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = 0
    for number in range(gl.program_id(0), N_TILES * x_tiles, gl.num_programs(0)):
        n_tile, x_tile = place_of(number, x_tiles, N_TILES)
        for step in range(STEPS):
            stage = count % W.NS
            if count >= AHEAD:
                mbarrier.wait(free.index(stage), (count // W.NS + 1) & 1)
                fetch_w(w, ring, n_tile, step, stage, P, W)
            fetch_x(sources, ring, (x_tile, last), step, stage, W)
            count += 1


@gluon_jit
def begin(at, part, acc, USE: gl.constexpr, W: gl.constexpr):
    """Begin the product of a group's rows of a part of x and a step's rows of W, added to acc if USE.

    at: the ring, the step's number.
    """
    ring, count = at
    ws, xs, _, _, _ = ring
    stage = count % W.NS
    w = ws._reinterpret(ws.dtype, [W.NS, 64 * W.HALVES, 128], box_layout(2)).index(stage)
    x = xs.index((stage * W.PARTS + part) * 2 + W.GROUP)
    return warpgroup_mma(x, w.permute([1, 0]), acc, use_acc=USE, is_async=True)


@gluon_jit
def await_step(at, W: gl.constexpr):
    """Wait for the copies of a step."""
    ring, count = at
    ready = ring[3]
    mbarrier.wait(ready.index(count % W.NS), count // W.NS & 1)


@gluon_jit
def release(at, W: gl.constexpr):
    """Give the place of a step back to the fetching warp."""
    ring, count = at
    free = ring[4]
    mbarrier.arrive(free.index(count % W.NS), count=1)


@gluon_jit
def scales_of_x(at, part, W: gl.constexpr):
    """Return the scales [64] of a step and a group's rows of a part of x."""
    ring, count = at
    sxs = ring[2]
    of_part = sxs.index(count % W.NS * W.PARTS + part).reshape([128])
    return of_part.slice(W.GROUP * 64, 64).load(gl.SliceLayout(1, sums_layout(W.HALVES)))


@gluon_jit
def promote(acc, sums, of_x, of_w, OTHERS: gl.constexpr, W: gl.constexpr):
    """Return acc + sums, sums multiplied by their scales if they have them; OTHERS products are under way."""
    if W.BLOCKS:
        acc = gl.fma(sums, of_x[:, None] * of_w[None, :], acc)
    else:
        acc = acc + sums
    # Nothing is waited for; but the compiler cannot move the addition behind the next product, whose sums would then
    # need further registers.
    return warpgroup_mma_wait(OTHERS, deps=[acc])


@gluon_jit
def end_step(acc, sums, at, scales, OTHERS: gl.constexpr, W: gl.constexpr):
    """Wait for a step's sums and return acc with them; OTHERS further products are under way.

    scales: of the step's rows of W, and of x unless the ring has those.
    """
    ring, _ = at
    of_w, of_x = scales
    sums = warpgroup_mma_wait(OTHERS, deps=[sums])
    if W.BLOCKS and ring[2] is not None:
        of_x = scales_of_x(at, 0, W)
    release(at, W)
    return promote(acc, sums, of_x, of_w, OTHERS, W)


@gluon_jit
def load_scales_of_w(source, further, P: gl.constexpr, W: gl.constexpr):
    """Load the scales [64 · HALVES] of a step's rows of W; without blocks nothing reads what is returned.

    source: all scales, the number of the tile and of a step; the step is `further` behind. A half of the tile has one
    scale, or one for each half of its pairs: a thread loads one number for many.
    """
    w_scale, n_tile, step = source
    if W.BLOCKS:
        at = w_scale + (step + further) * (P.N // 128)
        if P.SPAN == 0:
            only = gl.load(at + n_tile * W.HALVES // 2)
            return gl.full([64 * W.HALVES], only, gl.float32, gl.SliceLayout(0, sums_layout(W.HALVES)))
        else:
            row = gl.arange(0, 64 * W.HALVES, layout=gl.SliceLayout(0, sums_layout(W.HALVES)))
            pair = n_tile * (W.HALVES * 32)
            first = pair // P.SPAN * (2 * P.SPAN) + pair % P.SPAN
            of_w = gl.where(row % 16 < 8, gl.load(at + first // 128), gl.load(at + (first + P.SPAN) // 128))
            if P.SPAN % 64 != 0 and W.HALVES == 2:
                pair += 32
                first = pair // P.SPAN * (2 * P.SPAN) + pair % P.SPAN
                more = gl.where(row % 16 < 8, gl.load(at + first // 128), gl.load(at + (first + P.SPAN) // 128))
                of_w = gl.where(row < 64, of_w, more)
            return of_w
    else:
        return n_tile


@gluon_jit
def scales_of_w(source, further, P: gl.constexpr, W: gl.constexpr):
    """Return what `load_scales_of_w` does; scales of x are in the ring."""
    return load_scales_of_w(source, further, P, W), 0


@gluon_jit
def integer_sums(ring, count, P: gl.constexpr, W: gl.constexpr):
    """Return the int32 sums [64, 64 · HALVES] of the parts of x; a step is multiplied behind the next."""
    STEPS: gl.constexpr = (P.K + 127) // 128
    acc = gl.zeros([64, 64 * W.HALVES], gl.int32, sums_layout(W.HALVES))
    more = acc
    for step in range(STEPS):
        at = (ring, count)
        await_step(at, W)
        acc = begin(at, 0, acc, True, W)
        if W.PARTS == 2:
            more = begin(at, 1, more, True, W)
            acc, more = warpgroup_mma_wait(2, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        if step > 0:
            release((ring, count - 1), W)
        count += 1
    if W.PARTS == 2:
        acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
        more = acc
    release((ring, count - 1), W)
    return acc, more, count


@gluon_jit
def add_steps(acc, source, at, SCALES: gl.constexpr, NUM: gl.constexpr, P: gl.constexpr, W: gl.constexpr):
    """Return acc with NUM steps; one is added while the next is multiplied."""
    ring, count = at
    nothing = gl.zeros([64, 64 * W.HALVES], gl.float32, sums_layout(W.HALVES))
    scales = SCALES(source, 0, P, W)
    await_step((ring, count), W)
    sums = begin((ring, count), 0, nothing, False, W)
    for i in gl.static_range(1, NUM):
        next_scales = SCALES(source, i, P, W)
        await_step((ring, count + i), W)
        next_sums = begin((ring, count + i), 0, nothing, False, W)
        acc = end_step(acc, sums, (ring, count + i - 1), scales, 1, W)
        sums = next_sums
        scales = next_scales
    return end_step(acc, sums, (ring, count + NUM - 1), scales, 0, W)


@gluon_jit
def float_sums(source, ring, count, SCALES: gl.constexpr, P: gl.constexpr, W: gl.constexpr):
    """Return the float32 sums [64, 64 · HALVES] of one part of x.

    source: all scales, and a place in them. SCALES takes both with a step, and returns that step's scales of the rows
    of W and of x, as `scales_of_w` does.
    """
    scales, place = source
    STEPS: gl.constexpr = (P.K + 127) // 128
    acc = gl.zeros([64, 64 * W.HALVES], gl.float32, sums_layout(W.HALVES))
    # Some steps at a time: nothing is under way from one turn to the next, or the compiler lets none overlap.
    for turn in range(STEPS // W.TURN):
        acc = add_steps(acc, (scales, place, turn * W.TURN), (ring, count), SCALES, W.TURN, P, W)
        count += W.TURN
    if STEPS % W.TURN > 0:
        last = (scales, place, STEPS // W.TURN * W.TURN)
        acc = add_steps(acc, last, (ring, count), SCALES, STEPS % W.TURN, P, W)
        count += STEPS % W.TURN
    return acc, acc, count


@gluon_jit
def float_sums_of_two(of_w, ring, count, P: gl.constexpr, W: gl.constexpr):
    """Return the float32 sums [64, 64 · HALVES] of two parts of x.

    Registers hold the sums of one step and one part beside them: the other group fills the gaps of the tensor cores.
    """
    w_scale, n_tile = of_w
    STEPS: gl.constexpr = (P.K + 127) // 128
    acc = gl.zeros([64, 64 * W.HALVES], gl.float32, sums_layout(W.HALVES))
    more = acc
    nothing = acc
    next_w = load_scales_of_w((w_scale, n_tile, 0), 0, P, W)
    for step in range(STEPS):
        this_w = next_w
        next_w = load_scales_of_w((w_scale, n_tile, gl.minimum(step + 1, STEPS - 1)), 0, P, W)
        at = (ring, count)
        await_step(at, W)
        sums = begin(at, 0, nothing, False, W)
        sums = warpgroup_mma_wait(0, deps=[sums])
        of_x = scales_of_x(at, 0, W) if W.BLOCKS else None
        acc = promote(acc, sums, of_x, this_w, 0, W)
        sums = begin(at, 1, nothing, False, W)
        sums = warpgroup_mma_wait(0, deps=[sums])
        of_x = scales_of_x(at, 1, W) if W.BLOCKS else None
        release(at, W)
        more = promote(more, sums, of_x, this_w, 0, W)
        count += 1
    return acc, more, count
