"""What takes blocks of integrals on the CPU: AO tensors, and arrays of blocks.

`fill` (`md4.cpu.integrals`) leaves blocks as [ab][cd][lane], with rows (task, place of the bra pair, ket group, place
in memory) that say what they are.
"""

import numpy as np

from md4.cpu.compile import Loop, helper, part
from md4.cpu.emit.vectors import LANES, doubles, integers, least
from md4.cpu.groups import FIELD, SAME, TASK
from md4.cpu.run import run_lists
from md4.cpu.threads import number_of_threads, run_all
from md4.method import scatter
from md4.support.locks import once

is_repeated = helper(scatter.is_repeated)
place = None  # set by `Loop`, for one symmetry
# Integrals for which a further thread is worth waking.
THREAD_INTEGRALS = 100_000


@part
def numbers_of(box):
    """A box as numbers. A compiler that sees writes to an array would read the box again after each of them."""
    return box[0], box[1], box[2], box[3], box[4], box[5], box[6], box[7], box[8], box[9]


class HostBlock:
    """Integrals (ij, kl, ab, cd) in host memory, of any strides."""

    def __init__(self, array):
        self.array = array

    def swapped(self):
        """The same integrals with bra and ket exchanged."""
        return HostBlock(self.array.transpose(1, 0, 3, 2))

    def __getitem__(self, key):
        return HostBlock(self.array[key])


def scatter_lanes(items, tasks, lists, blocks, swap, box, out):
    """Writes blocks to an AO tensor; see `md4.method.scatter`."""
    box = numbers_of(box)
    for item in range(len(items)):
        task = tasks[items[item, 0]]
        bra, ket = lists[task[TASK.bra]], lists[task[TASK.ket]]
        n, g, at = items[item, 1], items[item, 2], items[item, 3]
        na, nb, nc, nd = bra[FIELD.na], bra[FIELD.nb], ket[FIELD.na], ket[FIELD.nb]
        order_ab, order_cd = integers(bra[FIELD.order], 1), integers(ket[FIELD.order], 1)
        aos_ab, aos_cd = integers(bra[FIELD.aos], 1), integers(ket[FIELD.aos], 1)
        same, swapped, ab = task[TASK.same] == SAME, task[TASK.swapped] != 0, order_ab[n]
        i0, j0, width = aos_ab[2 * ab], aos_ab[2 * ab + 1], ket[FIELD.width]
        first = g * (LANES // width)
        count = least(LANES // width, ket[FIELD.npair] - first)
        for a in range(na):
            for b in range(nb):
                for c in range(nc):
                    for pair in range(count):
                        m = first + pair
                        k0, l0 = aos_cd[2 * order_cd[m]], aos_cd[2 * order_cd[m] + 1]
                        for d in range(nd):
                            if not is_repeated(i0 == j0, k0 == l0, same, n, m, a, b, c, d, nb, nd):
                                i, j, k, l = i0 + a, j0 + b, k0 + c, l0 + d
                                if swapped:
                                    i, j, k, l = k, l, i, j
                                place(blocks[at + d * LANES + pair * width], i, j, k, l, swap, box, out)
                    at += nd * LANES


def scatter_rows(block, bra, ket, ao_bra, ao_ket, same_pieces, first, last, swap, box, out):
    """Writes the bra pairs first to last of a block (ij, kl, a, b, c, d) to an AO tensor."""
    _, nkl, na, nb, nc, nd = block.shape
    box = numbers_of(box)
    for n in range(first, last):
        same_ab = bra[n, 0] == bra[n, 1]
        for m in range(nkl):
            same_cd = ket[m, 0] == ket[m, 1]
            for a, b, c, d in np.ndindex(na, nb, nc, nd):
                if not is_repeated(same_ab, same_cd, same_pieces, n, m, a, b, c, d, nb, nd):
                    i, j, k, l = ao_bra[n, 0] + a, ao_bra[n, 1] + b, ao_ket[m, 0] + c, ao_ket[m, 1] + d
                    place(block[n, m, a, b, c, d], i, j, k, l, swap, box, out)


def copy_lanes(items, tasks, lists, blocks, address):
    """Copies blocks to an array at an address, to the places that `FIELD` describes."""
    out = doubles(address, 1)
    for item in range(len(items)):
        task = tasks[items[item, 0]]
        bra, ket = lists[task[TASK.bra]], lists[task[TASK.ket]]
        g, at, nab, ncd = items[item, 2], items[item, 3], bra[FIELD.nab], ket[FIELD.nab]
        order_ab, order_cd = integers(bra[FIELD.order], 1), integers(ket[FIELD.order], 1)
        width, step = ket[FIELD.width], ket[FIELD.of_function]
        begin = bra[FIELD.first] + ket[FIELD.first] + order_ab[items[item, 1]] * bra[FIELD.of_pair]
        first = g * (LANES // width)
        count = least(LANES // width, ket[FIELD.npair] - first)
        for ab in range(nab):
            for pair in range(count):
                start = begin + ab * bra[FIELD.of_function] + order_cd[first + pair] * ket[FIELD.of_pair]
                for cd in range(ncd):
                    out[start + cd * step] = blocks[at + cd * LANES + pair * width]
            at += ncd * LANES


def scatter_derivative_rows(
    block, bra, ket, ao_bra, ao_ket, na, derivative, first, last, in_triangle, box, out
):  # fmt: skip
    """As `scatter_rows`, of derivatives from number `derivative` on; the third index of a block is (derivative, a)."""
    _, nkl, rows, nb, nc, nd = block.shape
    for n in range(first, last):
        same_ab = bra[n, 0] == bra[n, 1]
        for m in range(nkl):
            same_cd = ket[m, 0] == ket[m, 1]
            for row, b, c, d in np.ndindex(rows, nb, nc, nd):
                number = derivative + row // na
                if not ((same_ab and number > 3) or (same_cd and c < d)):
                    i, j, k, l = ao_bra[n, 0] + row % na, ao_bra[n, 1] + b, ao_ket[m, 0] + c, ao_ket[m, 1] + d
                    place(block[n, m, row, b, c, d], number, i, j, k, l, in_triangle, box, out)


@once
def scatter_blocks(aosym):
    """`scatter_lanes` for one symmetry."""
    return Loop(scatter_lanes, f"scatter_lanes_{aosym}", place=scatter.make_place(aosym, part))


@once
def scatter_rows_of(aosym):
    """`scatter_rows` for one symmetry, or of derivatives."""
    if aosym == scatter.DERIVATIVES:
        return Loop(scatter_derivative_rows, place=scatter.make_place_derivative(part))
    return Loop(scatter_rows, f"scatter_rows_{aosym}", place=scatter.make_place(aosym, part))


copy_blocks = once(lambda: Loop(copy_lanes))


class BlockWriter:
    """Takes blocks to an array, to the places that the table of lists describes."""

    def __init__(self, out):
        self.out = out

    def __call__(self, thread, items, tasks, lists, blocks):
        copy_blocks()(items, tasks, lists, blocks, self.out.ctypes.data)


class ListTensor:
    """An AO tensor in host memory that takes whole lists; see `md4.backends.Target`.

    Parameters
    ----------
    engine : md4.Engine
    layout : md4.method.scatter.TensorLayout
    out : ndarray
        The tensor.
    """

    def __init__(self, engine, layout, out):
        self.engine, self.layout, self.out = engine, layout, out
        self.write, self.flat = scatter_blocks(layout.aosym), out.reshape(-1)

    def take(self, pairs, report=None):
        """Makes the integrals of all `ListPair`, and writes each to all its places."""
        run_lists(self.engine.backend, pairs, self.scatter, self.engine.bra_basis.ao_loc, report=report)

    def scatter(self, thread, items, tasks, lists, blocks):
        """Writes blocks; threads may do so at the same time, since no place belongs to two of them."""
        self.write(items, tasks, lists, blocks, self.layout.swap, self.layout.box, self.flat)

    def result(self):
        """The tensor."""
        return self.out


class HostTensor:
    """An AO tensor in host memory, filled block by block: the target of a GPU's integrals that do not fit there.

    Parameters
    ----------
    layout : md4.method.scatter.TensorLayout
    out : ndarray
        The tensor.
    """

    def __init__(self, layout, out):
        placing, self.flag = layout.placing
        self.write, self.layout, self.out, self.flat = scatter_rows_of(placing), layout, out, out.reshape(-1)

    def add(self, block, bra, ket, basis, triangle):
        """Writes a block to all places of its integrals. If `triangle` is true, bra and ket are the same pairs."""
        derivatives, na, bra, ket = bra.pairs.derivatives, bra.pairs.na, bra.pairs.pairs, ket.pairs.pairs
        ao_bra, ao_ket, box = basis.ao_loc[bra], basis.ao_loc[ket], self.layout.box
        of_list = (na, derivatives[0]) if derivatives else (triangle,)
        threads = int(max(1, min(number_of_threads(), len(bra), block.size // THREAD_INTEGRALS)))
        edges = np.linspace(0, len(bra), threads + 1).astype(np.int64).tolist()

        def part_of(n):
            ends = edges[n], edges[n + 1]
            self.write(block, bra, ket, ao_bra, ao_ket, *of_list, *ends, self.flag, box, self.flat)

        run_all(threads, part_of)

    def result(self):
        """The tensor."""
        return self.out
