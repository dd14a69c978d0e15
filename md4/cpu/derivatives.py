"""What takes blocks of derivatives on the CPU to a tensor; see `md4.contract.derivatives`.

One side of a block is a list of derivatives of shell pairs, whose rows are (derivative, a, b), and the other a list of
shell pairs. Which of the two is the bra is decided by the work. `FIELD.first` holds the number of the first derivative;
it is 0 for shell pairs.
"""

import numpy as np

from md4.cpu.compile import Loop, helper
from md4.cpu.emit.vectors import LANES, integers
from md4.cpu.groups import FIELD, TASK
from md4.cpu.run import run_lists
from md4.cpu.targets import ListTensor
from md4.method import scatter
from md4.support.locks import once

triangle = helper(scatter.triangle)


@helper
def derivative_places(this, pair, box, out):
    """Where the tensor has the derivatives of a shell pair, out[(derivative, a, b)]; -1 where it has them twice.

    The derivative by A is that of the function a of (a, b), the one by B that of b of (b, a). If a and b are of the
    same shell, those by A are all.
    """
    aos, na, nb = integers(this[FIELD.aos], 1), this[FIELD.na], this[FIELD.nb]
    a0, b0 = aos[2 * pair], aos[2 * pair + 1]
    for row in range(this[FIELD.nab]):
        derivative, i, j = this[FIELD.first] + row // (na * nb), a0 + row // nb % na, b0 + row % nb
        if derivative > 3:
            i, j = j, i
        out[row] = ((derivative - 1) % 3) * box[9] + ((i - box[0]) * box[4] + j - box[1]) * box[7]
        if derivative > 3 and a0 == b0:
            out[row] = -1


@helper
def pair_places(this, pair, in_triangle, box, rows, places):
    """Rows (c, d) of a shell pair and where the tensor has them, each place once; returns how many there are."""
    aos, nc, nd, count = integers(this[FIELD.aos], 1), this[FIELD.na], this[FIELD.nb], 0
    c0, d0 = aos[2 * pair], aos[2 * pair + 1]
    for turned in range(1 if in_triangle else 2):
        for row in range(nc * nd):
            c, d = row // nd, row % nd
            if c0 == d0 and (c < d or (turned > 0 and c == d)):
                continue
            k, l = (d0 + d - box[2], c0 + c - box[3]) if turned > 0 else (c0 + c - box[2], d0 + d - box[3])
            place, inside = k * box[6] + l, 0 <= k < box[5] and 0 <= l < box[6]
            if in_triangle:
                place = triangle(k, l) - box[10]
                inside = 0 <= place < box[11]
            if inside:
                rows[count], places[count] = row, place * box[8]
                count += 1
    return count


def scatter_derivatives(items, tasks, lists, blocks, in_triangle, box, out):
    """Writes blocks of derivatives with the sign of the nabla to a tensor; see `DerivativeLayout.box`."""
    most = lists[:, FIELD.nab].max()
    of_ab, of_cd, rows = np.empty(most, np.int64), np.empty(2 * most, np.int64), np.empty(2 * most, np.int64)
    for item in range(len(items)):
        task = tasks[items[item, 0]]
        bra, ket = lists[task[TASK.bra]], lists[task[TASK.ket]]
        order_bra, order_ket = integers(bra[FIELD.order], 1), integers(ket[FIELD.order], 1)
        width, one, columns = ket[FIELD.width], order_bra[items[item, 1]], ket[FIELD.nab] * LANES
        first = items[item, 2] * (LANES // width)
        for pair in range(min(LANES // width, ket[FIELD.npair] - first)):
            other, at = order_ket[first + pair], items[item, 3] + pair * width
            if bra[FIELD.first] > 0:
                nab, step_ab, step_cd = bra[FIELD.nab], columns, LANES
                derivative_places(bra, one, box, of_ab)
                count = pair_places(ket, other, in_triangle, box, rows, of_cd)
            else:
                nab, step_ab, step_cd = ket[FIELD.nab], LANES, columns
                derivative_places(ket, other, box, of_ab)
                count = pair_places(bra, one, in_triangle, box, rows, of_cd)
            for ab in range(nab):
                for n in range(count if of_ab[ab] >= 0 else 0):
                    out[of_ab[ab] + of_cd[n]] = -blocks[at + ab * step_ab + rows[n] * step_cd]


derivative_scatter = once(lambda: Loop(scatter_derivatives, allocates=True))


class DerivativeTensor(ListTensor):
    """Derivatives of an AO tensor in host memory, which take whole lists.

    Parameters
    ----------
    engine : md4.Engine
    layout : md4.method.scatter.DerivativeLayout
    out : ndarray
        The tensor.
    """

    def __init__(self, engine, layout, out):
        self.engine, self.layout, self.out = engine, layout, out
        self.write, self.flat = derivative_scatter(), out.reshape(-1)

    def take(self, pairs, report=None):
        """Makes the integrals of all `ListPair`, whose bra are derivatives, and writes each to all its places."""
        places = {pair.bra: (pair.bra.pairs.derivatives[0], 0, 0) for pair in pairs}
        run_lists(
            self.engine.backend, pairs, self.scatter, self.engine.bra_basis.ao_loc, report=report, places=places
        )  # fmt: skip

    def scatter(self, thread, items, tasks, lists, blocks):
        """Writes blocks; threads may do so at the same time, since no place belongs to two of them."""
        self.write(items, tasks, lists, blocks, self.layout.in_triangle, self.layout.box, self.flat)
