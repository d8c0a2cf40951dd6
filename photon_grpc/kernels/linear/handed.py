"""The steps of all tiles of a product, shared out evenly among programs: sums are handed on in the middle of a chain.

Where tiles do not fill the last wave of programs, multiprocessors are idle for up to a whole tile. Here a program has a
range of steps, of tile after tile; a tile that two programs share is one chain all the same: the first program adds up
its first steps and leaves the sums, the second goes on with them, so that the sums have the bits of one program.

A program goes through its range from the last tile to the first: what it leaves is there after less than a tile, what
it takes over is needed at the end. It waits for a program of a smaller number only, which began before it. A range is
no less than a tile, so that no third program has a part.
"""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import gl, gluon_jit


@gluon_jit
def range_of_program(num_tiles, BLOCKS: gl.constexpr):
    """Return the first block of steps of this program and the one behind its last; a tile has BLOCKS."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return program * (num_tiles * BLOCKS) // programs, (program + 1) * (num_tiles * BLOCKS) // programs


@gluon_jit
def num_jobs(num_tiles, BLOCKS: gl.constexpr, IS_HANDED: gl.constexpr):
    """Return the tiles of which this program has steps."""
    if IS_HANDED:
        start, stop = range_of_program(num_tiles, BLOCKS)
        return (stop + BLOCKS - 1) // BLOCKS - start // BLOCKS
    else:
        return (num_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon_jit
def job_of(number, num_tiles, BLOCKS: gl.constexpr, IS_HANDED: gl.constexpr):
    """Return the `number`-th tile of this program, its first block of steps and the one behind its last."""
    if IS_HANDED:
        start, stop = range_of_program(num_tiles, BLOCKS)
        tile = (stop - 1) // BLOCKS - number
        return tile, gl.maximum(start - tile * BLOCKS, 0), gl.minimum(stop - tile * BLOCKS, BLOCKS)
    else:
        return gl.program_id(0) + number * gl.num_programs(0), 0, BLOCKS


@gluon_jit
def hand_on(handed, GROUP: gl.constexpr, first, second, HAS_SECOND: gl.constexpr):
    """Leave the sums [64, columns] of a group of warps for the next program: `first`, and `second` if HAS_SECOND.

    handed: memory of numbers of 32 bits, for each program and group the numbers of both; int32 counters of both, zero
    before and after.
    """
    memory, counters = handed
    slot = gl.program_id(0) * 2 + GROUP
    at, beyond = places(memory, slot, first, second, HAS_SECOND)
    gl.store(at, in_memory(first))
    if HAS_SECOND:
        gl.store(beyond, in_memory(second))
    gl.thread_barrier()
    gl.atomic_add(counters + slot, 1, sem="release")


@gluon_jit
def take_over(handed, GROUP: gl.constexpr, is_begun, first, second, HAS_SECOND: gl.constexpr):
    """Return the sums that the program before has left, of the form of `first` and `second`; zeros unless is_begun."""
    memory, counters = handed
    # The first program takes nothing over.
    slot = gl.maximum(gl.program_id(0) - 1, 0) * 2 + GROUP
    at, beyond = places(memory, slot, first, second, HAS_SECOND)
    if is_begun:
        is_there = gl.load(counters + slot, volatile=True)
        while is_there == 0:
            is_there = gl.load(counters + slot, volatile=True)
        # All threads have seen it before one takes it back.
        gl.thread_barrier()
        gl.atomic_xchg(counters + slot, 0, sem="acq_rel")
        gl.thread_barrier()
    # Not in a branch: products must not meet two definitions of their sums.
    first = in_registers(gl.load(at, mask=begun(at, is_begun), other=0, cache_modifier=".cg"), first)
    if HAS_SECOND:
        second = in_registers(gl.load(beyond, mask=begun(beyond, is_begun), other=0, cache_modifier=".cg"), second)
    return first, second


@gluon_jit
def begun(at, is_begun):
    """Return is_begun for every place."""
    SIZE: gl.constexpr = at.shape[0]
    layout: gl.constexpr = at.type.layout
    return (gl.arange(0, SIZE, layout=layout) >= 0) & is_begun


@gluon_jit
def places(memory, slot, first, second, HAS_SECOND: gl.constexpr):
    """Return pointers to the numbers of a slot."""
    SIZE: gl.constexpr = first.shape[0] * first.shape[1]
    if HAS_SECOND:
        memory += slot * (SIZE + second.shape[0] * second.shape[1])
        return memory + numbers_of(first), memory + SIZE + numbers_of(second)
    else:
        memory += slot * SIZE
        return memory + numbers_of(first), memory


@gluon_jit
def numbers_of(sums):
    """Return the numbers of the places of sums in memory."""
    SIZE: gl.constexpr = sums.shape[0] * sums.shape[1]
    layout: gl.constexpr = in_memory(sums).type.layout
    return gl.arange(0, SIZE, layout=layout)


@gluon_jit
def in_memory(sums):
    """Return sums [64, columns] one after the other, so that a thread has four neighbours, and the next the next four.

    Row 16a + 8b + c of column 8d + 2e + f is in warp a and its lane 4c + e.
    """
    SIZE: gl.constexpr = sums.shape[0] * sums.shape[1]
    EIGHTS: gl.constexpr = sums.shape[1] // 8
    return sums.reshape([4, 2, 8, EIGHTS, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([SIZE])


@gluon_jit
def in_registers(numbers, like):
    """Return what `in_memory` takes, in the layout of `like`."""
    COLUMNS: gl.constexpr = like.shape[1]
    layout: gl.constexpr = like.type.layout
    parts = numbers.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(parts.reshape([64, COLUMNS]), layout, assert_trivial=True)
