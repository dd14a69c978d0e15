"""The loop of a product whose operands come to shared memory in steps of 8 inner indices.

There is room for `stages` steps, which is used in turn, as a ring. While a block multiplies the operands of one step,
the copies of the next `stages - 1` are under way. One operand is always H, a panel of which serves all warps.
"""

from typing import NamedTuple

from md4.gpu.device_code import I32, cuda, i64, jit_device, types
from md4.gpu.emit.instructions import address_of, commit_copies, make_copies, make_wait_copies


class Course(NamedTuple):
    """The steps of a product, and where their operands stand in global memory.

    Attributes
    ----------
    count, depth : int64
        Primitive pairs, and steps of each of them.
    reach : int32 array
        Blocks of 8 rows of H that count in each step of a primitive pair, from the first row of H on.
    row : int64
        First block of rows of this product.
    h, h_step, h_skip : int64
        Place of H in the first step, how far it moves in a step, and how much further after the last step of a
        primitive pair.
    other, other_step, other_skip : int64
        The same of the other operand.
    """

    count: i64
    depth: i64
    reach: I32
    row: i64
    h: i64
    h_step: i64
    h_skip: i64
    other: i64
    other_step: i64
    other_skip: i64


def following(h, other, k, course):
    """Places of the operands after a step, and its number in its primitive pair (device function)."""
    h += course.h_step
    other += course.other_step
    k += 1
    if k == course.depth:
        h += course.h_skip
        other += course.other_skip
        k = i64(0)
    return h, other, k


def nothing(*args):
    """Where a product has nothing to do at some point of the loop (device function)."""


def make_ring(stages, stage_bytes, fill, multiply, begin=nothing, fetch=nothing):
    """Device function (tile, ring, course, operands) -> tile + the product of all steps; `ring` is a shared address.

    Parameters
    ----------
    stages, stage_bytes : int
    fill : callable
        (address, h, other, k, operands): starts the copies of step k of a primitive pair to shared memory.
    multiply : callable
        (tile, offset, n, count, operands) -> tile + the product of one step of the n-th primitive pair, of which
        `count` blocks of 8 rows count; `offset` is what the step's buffer is away from the ring's first, in bytes.
    begin : callable, optional
        (n, operands): before the first step of the n-th primitive pair.
    fetch : callable, optional
        (n, k, operands): starts copies that belong to those of a step, after a barrier.
    """
    fill, multiply, begin, fetch, advance = map(jit_device, (fill, multiply, begin, fetch, following))
    wait = make_wait_copies(stages - 2)

    def ring_product(tile, ring, course, operands):
        steps, h, other, coming_k = course.count * course.depth, course.h, course.other, i64(0)
        for n in range(stages - 1):
            if n < steps:
                fill(ring + n * stage_bytes, h, other, coming_k, operands)
            commit_copies()
            h, other, coming_k = advance(h, other, coming_k, course)
        step, slot, reach = 0, 0, course.reach[0]
        for n in range(course.count):
            begin(n, operands)
            for k in range(course.depth):
                # the reach of the next step is fetched now
                count, reach = types.int32(reach - course.row), course.reach[k + 1 if k + 1 < course.depth else 0]
                wait()
                cuda.syncthreads()
                if step + stages - 1 < steps:
                    free = slot + stages - 1 if slot == 0 else slot - 1
                    fill(ring + free * stage_bytes, h, other, coming_k, operands)
                fetch(n, k, operands)
                commit_copies()
                h, other, coming_k = advance(h, other, coming_k, course)
                tile = multiply(tile, slot * stage_bytes, n, count, operands)
                step += 1
                slot = slot + 1 if slot + 1 < stages else 0
        return tile

    return jit_device(ring_product)


# copies of a block of threads


def make_copy_panel(rows8, threads):
    """Device function: the block starts to copy a panel's `rows8` blocks of 8 rows, 32 pieces of 16 bytes each."""
    count = 32 * rows8
    copies = make_copies(-(-count // threads), 16 * threads)

    def copy_panel(address, array, index, tid):
        limit = (count - tid + threads - 1) // threads
        copies(types.int32(address + 16 * tid), address_of(array, index + 2 * tid), limit)

    return jit_device(copy_panel)


def make_copy_range(threads):
    """Device function: the block starts to copy `count` doubles from array[index:]."""
    copies = make_copies(1, 0)

    def copy_range(address, array, index, count, tid):
        n = tid
        while n < count // 2:  # no `range`: it divides by its step
            copies(types.int32(address + 16 * n), address_of(array, index + 2 * n), i64(1))
            n += threads

    return jit_device(copy_range)
