"""Digestion on the CPU: blocks of LANES quartets are added to X and Y, all lanes at the same time.

The quartets of a block share the bra pair ab, and have ket pairs cd of their own. So what belongs to c or d is gathered
from the density matrices into lanes before, and added to X and Y lane by lane afterwards. Each thread has its own X and
Y; see `md4.method.digestion` for what they are.
"""

from md4.cpu.compile import Loop, helper, part
from md4.cpu.emit.vectors import (
    LANES,
    broadcast,
    fma,
    integers,
    lane_doubles,
    lane_integers,
    least,
    load,
    multiply,
    store,
    total,
    view,
)
from md4.cpu.groups import FIELD, SAME, TASK
from md4.method.digestion import quartet_weight
from md4.support.locks import once

weight_of = helper(quartet_weight)


@helper
def gather(matrix, row, rows, columns, count, lanes, width, out):
    """out[r][n][lane] = matrix[row + r, columns[lane] + n] for every `width`-th lane."""
    for r in range(rows):
        for lane in range(0, lanes, width):
            for n in range(count):
                out[(r * count + n) * LANES + lane] = matrix[row + r, columns[lane] + n]


@helper
def scatter(values, row, rows, columns, count, lanes, width, matrix):
    """matrix[row + r, columns[lane] + n] += values[r][n][lane] for every `width`-th lane; the values become zero."""
    for r in range(rows):
        for n in range(count):
            for lane in range(0, lanes, width):
                at = (r * count + n) * LANES + lane
                matrix[row + r, columns[lane] + n] += values[at]
                values[at] = 0.0


@part
def digest_one(
    blocks, at, weights, sizes, with_j, d_ac, d_ad, d_bc, d_bd, d_cd, twice, a0, b0, x_ac, x_ad, x_bc, x_bd, y_cd, y
):  # fmt: skip
    """Adds a block to X and Y of one density matrix, all in lanes but `twice`, D + D^T, and `y`."""
    na, nb, nc, nd = sizes
    weight = load(weights, 0)
    for a in range(na):
        for b in range(nb):
            y_ab, twice_ab = broadcast(0.0), broadcast(0.0)
            if with_j:
                twice_ab = broadcast(twice[a0 + a, b0 + b])
            for c in range(nc):
                ac, bc = load(x_ac, (a * nc + c) * LANES), load(x_bc, (b * nc + c) * LANES)
                of_ac, of_bc = load(d_ac, (a * nc + c) * LANES), load(d_bc, (b * nc + c) * LANES)
                for d in range(nd):
                    value = multiply(weight, load(blocks, at))
                    at += LANES
                    ad, bd, cd = (a * nd + d) * LANES, (b * nd + d) * LANES, (c * nd + d) * LANES
                    ac = fma(value, load(d_bd, bd), ac)
                    bc = fma(value, load(d_ad, ad), bc)
                    store(x_ad, ad, fma(value, of_bc, load(x_ad, ad)))
                    store(x_bd, bd, fma(value, of_ac, load(x_bd, bd)))
                    if with_j:
                        y_ab = fma(value, load(d_cd, cd), y_ab)
                        store(y_cd, cd, fma(value, twice_ab, load(y_cd, cd)))
                store(x_ac, (a * nc + c) * LANES, ac)
                store(x_bc, (b * nc + c) * LANES, bc)
            if with_j:
                y[a0 + a, b0 + b] += total(y_ab)


def digest_lanes(items, tasks, lists, blocks, densities, twice, lanes_of, x, y):
    """Adds blocks to X and Y of one thread, shapes (n_k, nao, nao) and (n_j, nao, nao), n_j <= n_k.

    `lanes_of` is memory for ten arrays of lanes, of D and of X and Y between two shells.
    """
    size = len(lanes_of) // 10
    lanes_of[:] = 0.0
    d_ac, d_ad, d_bc = view(lanes_of, 0, size), view(lanes_of, size, size), view(lanes_of, 2 * size, size)
    d_bd, d_cd, y_cd = view(lanes_of, 3 * size, size), view(lanes_of, 4 * size, size), view(lanes_of, 9 * size, size)
    x_ac, x_ad = view(lanes_of, 5 * size, size), view(lanes_of, 6 * size, size)
    x_bc, x_bd = view(lanes_of, 7 * size, size), view(lanes_of, 8 * size, size)
    weights, first_c, first_d = lane_doubles(), lane_integers(), lane_integers()
    for item in range(len(items)):
        task = tasks[items[item, 0]]
        bra, ket = lists[task[TASK.bra]], lists[task[TASK.ket]]
        n, g, at = items[item, 1], items[item, 2], items[item, 3]
        na, nb, nc, nd = bra[FIELD.na], bra[FIELD.nb], ket[FIELD.na], ket[FIELD.nb]
        order_ab, order_cd = integers(bra[FIELD.order], 1), integers(ket[FIELD.order], 1)
        aos_ab, aos_cd = integers(bra[FIELD.aos], 1), integers(ket[FIELD.aos], 1)
        same, ab = task[TASK.same] == SAME, order_ab[n]
        a0, b0 = aos_ab[2 * ab], aos_ab[2 * ab + 1]
        width = ket[FIELD.width]
        per_group = LANES // width
        lanes = least(per_group, ket[FIELD.npair] - g * per_group) * width
        for lane in range(LANES):
            weights[lane] = 0.0
        for lane in range(0, lanes, width):
            m = g * per_group + lane // width
            cd = order_cd[m]
            first_c[lane], first_d[lane] = aos_cd[2 * cd], aos_cd[2 * cd + 1]
            weights[lane] = weight_of(a0, b0, first_c[lane], first_d[lane], same, n, m)
        for s in range(len(densities)):
            density, x_s, with_j = densities[s], x[s], s < len(twice)
            gather(density, a0, na, first_c, nc, lanes, width, d_ac)
            gather(density, a0, na, first_d, nd, lanes, width, d_ad)
            gather(density, b0, nb, first_c, nc, lanes, width, d_bc)
            gather(density, b0, nb, first_d, nd, lanes, width, d_bd)
            t = s if with_j else 0
            if with_j:
                for lane in range(0, lanes, width):
                    for c in range(nc):
                        for d in range(nd):
                            d_cd[(c * nd + d) * LANES + lane] = twice[t, first_c[lane] + c, first_d[lane] + d]
            digest_one(
                blocks, at, weights, (na, nb, nc, nd), with_j, d_ac, d_ad, d_bc, d_bd, d_cd, twice[t], a0, b0,
                x_ac, x_ad, x_bc, x_bd, y_cd, y[t],
            )  # fmt: skip
            scatter(x_ac, a0, na, first_c, nc, lanes, width, x_s)
            scatter(x_ad, a0, na, first_d, nd, lanes, width, x_s)
            scatter(x_bc, b0, nb, first_c, nc, lanes, width, x_s)
            scatter(x_bd, b0, nb, first_d, nd, lanes, width, x_s)
            if with_j:
                for c in range(nc):
                    for d in range(nd):
                        for lane in range(0, lanes, width):
                            y[t, first_c[lane] + c, first_d[lane] + d] += y_cd[(c * nd + d) * LANES + lane]
                            y_cd[(c * nd + d) * LANES + lane] = 0.0


digest_blocks = once(lambda: Loop(digest_lanes))
