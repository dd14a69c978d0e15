"""Steps 2 to 5 on the CPU: LANES shell quartets side by side, one bra pair with a group of ket pairs.

`fill` takes tasks from a table that all threads share, and makes their blocks one after the other, until the memory for
blocks is full. Whoever called it then takes the blocks to a tensor or to J and K (`md4.cpu.targets`), and calls again.
A block is (ab|cd) of one bra pair with the LANES ket pairs of a group, as [ab][cd][lane].

The rows of H have many zeros by symmetry, which both products leave out. [p|q] is not stored: r lies in a cube, where
the place of r[p+q] is the sum of the places of p and of q.
"""

import numpy as np

from md4.cpu.compile import Loop, bound, part
from md4.cpu.emit.recurrence import cube_side, recur
from md4.cpu.emit.vectors import (
    LANES,
    broadcast,
    doubles,
    fma,
    halves,
    integers,
    largest,
    least,
    load,
    make_add_lanes,
    make_tile,
    multiply,
    negative,
    store,
    subtract,
    take,
    take_next,
    view,
)
from md4.cpu.emit.zeros import zeros_of
from md4.cpu.groups import BLOCK, DIAGONAL, FIELD, PRIMITIVE, ROWS_OF_TILE, SAME, STATE, TASK
from md4.support.locks import once

# Rows of (ab|q] that are made together where each bra pair has one primitive, and bytes that they should take.
ROWS, ROW_BYTES = 8, 768 << 10
add_lanes1, add_lanes2, add_lanes4 = (make_add_lanes(distance) for distance in (1, 2, 4))
zeros_of_lanes = None  # set by `fill_blocks`, for one operator
height = tile8 = tile4 = tile1 = None  # set by `make_products`


def block_products(h, h0, offsets, rows, nrow, ncolumn, source, columns, out, place, a, da, b, db, more):
    """A block of H times all columns; see `md4.cpu.emit.vectors.make_tile`.

    `rows[row]` and `rows[row + 1]` are the first and after the last element of a row. The result of a row and a column
    goes to `place` + a[row] da + b[column] db. What is left of an odd number of rows is a tile of the same row twice.
    """
    c = 0
    while c < ncolumn:
        left = ncolumn - c
        width = 8 if left >= 8 else (4 if left >= 4 else 1)
        for row in range(0, nrow, height):
            after = least(row + height, nrow) - 1
            begin, end, below = rows[row], rows[row + 1], rows[after] - rows[row]
            if width == 8:
                tile8(h, h0, offsets, begin, end, below, source, columns, c, out, place, a, row, after, da, b, db, more)
            elif width == 4:
                tile4(h, h0, offsets, begin, end, below, source, columns, c, out, place, a, row, after, da, b, db, more)
            else:
                tile1(h, h0, offsets, begin, end, below, source, columns, c, out, place, a, row, after, da, b, db, more)
        c += width


def make_products(name, by_lane, rows):
    """`block_products` of `rows` rows at a time, for H that is the same in all lanes, or that each lane has."""
    return bound(
        block_products, name, height=rows, **{f"tile{width}": make_tile(rows, width, by_lane) for width in (8, 4, 1)}
    )


products = make_products("products", False, ROWS_OF_TILE)
lane_products = make_products("lane_products", True, ROWS_OF_TILE)
side_of_cube = part(cube_side)


@part
def cube_places(this, side, out):
    """Where the Hermite functions of a list lie in the cube."""
    triples = integers(this[FIELD.triples], 1)
    for p in range(this[FIELD.nherm]):
        out[p] = ((triples[3 * p] * side + triples[3 * p + 1]) * side + triples[3 * p + 2]) * LANES


@part
def set_places(bra, ket, side, work):
    """Where the factors of each element of H lie, for a bra and a ket list: places in the cube r and in (ab|q]."""
    p_of, q_of = halves(bra[FIELD.columns], 1), halves(ket[FIELD.columns], 1)
    triples = integers(bra[FIELD.triples], 1)
    for n in range(bra[FIELD.elements]):
        p = 3 * p_of[n]
        work.of_p[n] = ((triples[p] * side + triples[p + 1]) * side + triples[p + 2]) * LANES
    cube_places(ket, side, work.column_q)
    for n in range(ket[FIELD.elements]):
        work.of_q[n] = q_of[n] * LANES
    for ab in range(bra[FIELD.nab]):
        work.column_ab[ab] = ab * ket[FIELD.nherm] * LANES


@part
def quartet_count(n, g, npair, per_group, same):
    """How many unordered quartets a block of bra pair n with ket group g has."""
    here = least(per_group, npair - g * per_group)
    return least(here, n - g * per_group + 1) if same else here


@part
def add_signs(abq, rows, triples, nq):
    """Multiplies (ab|q] by (-1)^|q|.

    In a diagonal block H of the bra includes (-1)^|p|, as that of the ket (-1)^|q|. Both signs go into r[p+q] if P and
    Q change places. What is missing then is (-1)^|q|.
    """
    for q in range(nq):
        if (triples[3 * q] + triples[3 * q + 1] + triples[3 * q + 2]) % 2 == 1:
            for row in range(rows):
                at = (row * nq + q) * LANES
                store(abq, at, negative(load(abq, at)))


def block_of_quartets(bra, ket, diagonal, primitives, vectors, parameter, table, work, place):
    """Steps 2 to 5: (ab|cd) of a bra pair with a group of ket pairs, to work.out[place:].

    `primitives` are the first and after the last primitive pair of the bra (vectors of them in a diagonal block), and
    `vectors` those of the ket.
    """
    l, nq, nab, ncd = bra[FIELD.l] + ket[FIELD.l], ket[FIELD.nherm], bra[FIELD.nab], ket[FIELD.nab]
    n_ab, n_cd, side = bra[FIELD.elements], ket[FIELD.elements], side_of_cube(l)
    blocks_ab, blocks_cd = (bra[FIELD.nherm] + BLOCK - 1) // BLOCK, (nq + BLOCK - 1) // BLOCK
    rows_ab = halves(bra[FIELD.rows], blocks_ab * nab + 1)
    rows_cd = halves(ket[FIELD.rows], blocks_cd * ncd + 1)
    bra_data = doubles(bra[FIELD.lane_primitives if diagonal else FIELD.primitives], 1)
    h_ab = doubles(bra[FIELD.lane_h if diagonal else FIELD.h], 1)
    ket_data, h_cd = doubles(ket[FIELD.lane_primitives], 1), doubles(ket[FIELD.lane_h], 1)
    triples = integers(ket[FIELD.triples], 1)
    stride = LANES if diagonal else 1
    sequence_ab, sequence_cd = integers(bra[FIELD.sequence], nab), integers(ket[FIELD.sequence], ncd)
    zero, step = np.int64(0), np.int64(LANES)  # not literals, for each of which a function would be compiled anew
    (i0, i1), (k0, k1), out, r = primitives, vectors, work.out, work.r
    if i0 == i1 or k0 == k1:
        for at in range(place, place + nab * ncd * LANES, LANES):
            store(out, at, broadcast(0.0))
        return
    rows = nab
    if i1 - i0 == 1:
        rows = ROWS * largest(1, ROW_BYTES // (ROWS * 8 * LANES * nq))
    for k in range(k0, k1):
        at_q = k * PRIMITIVE.size * LANES
        for first in range(0, nab, rows):
            last = least(first + rows, nab)
            for i in range(i0, i1):
                at_p = i * PRIMITIVE.size * stride
                if first == 0:
                    # P - Q, but Q - P in a diagonal block; see `add_signs`
                    rz = subtract(take(bra_data, at_p + stride, diagonal), load(ket_data, at_q + LANES))
                    ry = subtract(take(bra_data, at_p + 2 * stride, diagonal), load(ket_data, at_q + 2 * LANES))
                    rx = subtract(take(bra_data, at_p + 3 * stride, diagonal), load(ket_data, at_q + 3 * LANES))
                    if diagonal:
                        rz, ry, rx = negative(rz), negative(ry), negative(rx)
                    r2 = fma(rz, rz, fma(ry, ry, multiply(rx, rx)))
                    zeros_of_lanes(
                        l, take(bra_data, at_p, diagonal), load(ket_data, at_q), r2, parameter, table,
                        work.axis, work.zeros,
                    )  # fmt: skip
                    recur(l, side, work.zeros, rz, ry, rx, work.axis, r)
                for block in range(blocks_ab):
                    segment = view(rows_ab, block * nab + first, last - first + 1)
                    if diagonal:
                        lane_products(
                            h_ab, i * n_ab, work.of_p, segment, last - first, nq, r, work.column_q,
                            work.abq, zero, work.numbers, nq * step, work.numbers, step, i > i0 or block > 0,
                        )  # fmt: skip
                    else:
                        products(
                            h_ab, i * n_ab, work.of_p, segment, last - first, nq, r, work.column_q,
                            work.abq, zero, work.numbers, nq * step, work.numbers, step, i > i0 or block > 0,
                        )  # fmt: skip
            if diagonal:
                add_signs(work.abq, last - first, triples, nq)
            for block in range(blocks_cd):
                segment, sequence = view(rows_cd, block * ncd, ncd + 1), view(sequence_ab, first, last - first)
                lane_products(
                    h_cd, k * n_cd, work.of_q, segment, ncd, last - first, work.abq, work.column_ab,
                    out, place, sequence_cd, step, sequence, ncd * step, k > k0 or block > 0,
                )  # fmt: skip
    if ket[FIELD.width] > 1:
        add_up_lanes(out, place, place + nab * ncd * LANES, ket[FIELD.width])


@part
def add_up_lanes(out, first, last, width):
    """Sums a block over the lanes of each pair; all of them get the sum."""
    for at in range(first, last, LANES):
        value = add_lanes1(load(out, at))
        if width >= 4:
            value = add_lanes2(value)
        if width >= 8:
            value = add_lanes4(value)
        store(out, at, value)


def fill(tasks, lists, counter, tolerance, parameter, table, work):
    """Makes blocks until `work.out` is full or no task is left.

    Parameters
    ----------
    tasks : ndarray of int64, shape (ntask, TASK.size)
    lists : ndarray of int64, shape (nlist, FIELD.size)
    counter : ndarray of int64, shape (1,)
        The next task; all threads share it.
    tolerance : float
        A block is left out if the bound of the bra pair times that of the ket group is smaller.
    parameter, table
        The operator's parameter and table.
    work : Workspace
        Memory of this thread. Its `state` says where the last call stopped.

    Returns
    -------
    int
        Number of blocks: rows (task, place of the bra pair, ket group, place in `out`) of `work.items`.
    """
    state, items, used, count = work.state, work.items, np.int64(0), np.int64(0)
    while True:
        if state[STATE.task] < 0:
            state[STATE.task] = take_next(counter)
            if state[STATE.task] < len(tasks):
                state[STATE.bra], state[STATE.group] = tasks[state[STATE.task], TASK.first], 0
        if state[STATE.task] >= len(tasks):
            return count
        task = tasks[state[STATE.task]]
        bra, ket = lists[task[TASK.bra]], lists[task[TASK.ket]]
        same, diagonal = task[TASK.same] == SAME, task[TASK.same] == DIAGONAL
        set_places(bra, ket, side_of_cube(bra[FIELD.l] + ket[FIELD.l]), work)
        size = bra[FIELD.nab] * ket[FIELD.nab] * LANES
        order, start = integers(bra[FIELD.order], 1), integers(bra[FIELD.start], 1)
        vectors, per_group = integers(ket[FIELD.vectors], 1), LANES // ket[FIELD.width]
        bounded = task[TASK.bra_bound] != 0
        bra_bound, ket_bound = doubles(task[TASK.bra_bound], 1), doubles(task[TASK.ket_bound], 1)
        for n in range(state[STATE.bra], task[TASK.last]):
            first, last = state[STATE.group], ket[FIELD.ngroup]
            state[STATE.group] = 0
            if diagonal:
                first, last, primitives = n, n + 1, (vectors[n], vectors[n + 1])
            else:
                primitives = start[order[n]], start[order[n] + 1]
                if same:
                    last = n // per_group + 1
            for g in range(first, last):
                if bounded and not bra_bound[n] * ket_bound[g] >= tolerance:
                    continue
                if used + size > len(work.out) or count == len(items):
                    state[STATE.bra], state[STATE.group] = n, g
                    return count
                block_of_quartets(
                    bra, ket, diagonal, primitives, (vectors[g], vectors[g + 1]), parameter, table, work, used
                )
                items[count, 0], items[count, 1], items[count, 2], items[count, 3] = state[STATE.task], n, g, used
                state[STATE.quartets] += quartet_count(n, g, ket[FIELD.npair], per_group, same)
                count, used = count + 1, used + size
        state[STATE.task] = -1


@once
def fill_blocks(kind):
    """`fill` for one operator."""
    block = bound(block_of_quartets, make=part, zeros_of_lanes=zeros_of(kind))
    return Loop(fill, f"fill_{kind}", block_of_quartets=block)
