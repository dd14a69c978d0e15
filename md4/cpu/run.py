"""Many pairs of lists at once: tasks, which the threads take one after the other, and the memory of each thread."""

from collections import namedtuple
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from md4.cpu.emit.recurrence import cube_side
from md4.cpu.emit.vectors import LANES
from md4.cpu.groups import (
    DIAGONAL,
    DIFFERENT,
    FIELD,
    SAME,
    STATE,
    TASK,
    aligned_empty,
    functions_of,
    h_elements,
    lane_layout,
    structure_of,
)
from md4.cpu.h_matrices import BOTH
from md4.cpu.integrals import ROW_BYTES, ROWS, fill_blocks
from md4.cpu.threads import number_of_threads, run_threads
from md4.method.angular import nherm
from md4.plan import ListPair, part_of

# Doubles of blocks that a thread makes before they are taken to their target; a block may be larger.
OUT = 1 << 17
# Blocks that a thread makes at most before they are taken to their target, and where there is little memory.
ITEMS, FEW_ITEMS = 4096, 64
# Work, in vector operations, for which a further thread is worth waking, and tasks that each thread should have.
THREAD_WORK, TASKS = 300_000, 12


class Workspace(namedtuple("Workspace", "state items zeros axis r abq of_p column_q of_q column_ab numbers out")):
    """Memory of one thread, which `md4.cpu.integrals` uses.

    Attributes
    ----------
    state : ndarray of int64, shape (STATE.size,)
    items : ndarray of int64, shape (n, 4)
        What the blocks are; see `fill`.
    zeros, axis, r, abq : ndarray
        Vectors: [0]^(m), those of the recurrence, the cube r[p+q], and (ab|q].
    of_p, column_q, of_q, column_ab : ndarray of int32
        Places in the cube and in (ab|q]; see `set_places`.
    numbers : ndarray of int64
        0, 1, 2, ...
    out : ndarray
        Blocks.
    """

    __slots__ = ()

    def holds(self, sizes):
        """Whether all arrays are as long as `sizes` says."""
        return all(len(array) >= size for array, size in zip(self[1:], sizes))


class Sizes(namedtuple("Lengths", Workspace._fields[1:])):
    """Lengths of the arrays of a `Workspace` from `items` on."""

    __slots__ = ()

    @property
    def nbytes(self):
        """Bytes of a workspace."""
        doubles = self.zeros + self.axis + self.r + self.abq + self.out
        return 8 * (doubles + 5 * 8 + 4 * self.items + self.numbers + STATE.size) + 4 * sum(self[5:9])

    def allocated(self, memory):
        """A `Workspace` of these sizes."""
        state, items = np.zeros(STATE.size, dtype=np.int64), np.empty((self.items, 4), dtype=np.int64)
        doubles = [aligned_empty((n,)) for n in self[1:5]]
        places = [np.empty(n, dtype=np.int32) for n in self[5:9]]
        made = Workspace(state, items, *doubles, *places, np.arange(self.numbers), aligned_empty((self.out,)))
        for array in made:
            memory.watch(array)
        return made


def sizes_for(bra, ket, out=OUT):
    """`Sizes` for the bra and ket lists of some tasks.

    `bra` and `ket` hold the columns l, nab, nherm, elements and most of `FIELD`, shapes (5, ntask). There is room for
    one block, and for more in `out` doubles.
    """
    l, rows = bra[0] + ket[0], np.where(bra[4] == 1, np.minimum(bra[1], rows_at_once(ket[2])), bra[1])
    highest = int(l.max())
    vectors = highest + 1, 3 * (highest + 1) ** 2, cube_side(highest) ** 3, int((rows * ket[2]).max())
    places = (int(column.max()) for column in (bra[3], ket[2], ket[3], bra[1]))
    items = ITEMS if out else FEW_ITEMS
    block, numbers = int((bra[1] * ket[1]).max()) * LANES, int(max(bra[1:3].max(), ket[2].max()))
    return Sizes(items, *(n * LANES for n in vectors), *places, numbers, max(out, block))


def task_sizes(table, tasks):
    """`Sizes` for a table of tasks, as a function of `out`."""
    columns = [FIELD.l, FIELD.nab, FIELD.nherm, FIELD.elements, FIELD.most]
    bra, ket = (table[tasks[:, side]][:, columns].T for side in (TASK.bra, TASK.ket))
    return lambda out: sizes_for(bra, ket, out)


def sizes_of_pairs(bra, ket):
    """The least `Sizes` for two `ShellPairs`."""
    return sizes_of_lists([bra], [ket])


def sizes_of_lists(bras, kets):
    """The least `Sizes` for all of some `ShellPairs` with all of others."""
    of_bras, of_kets = (
        np.array([(p.l, p.nab, len(functions_of(p)[0]), h_elements(p), p.max_prim) for p in side]).T
        for side in (bras, kets)
    )
    return sizes_for(np.repeat(of_bras, len(kets), axis=1), np.tile(of_kets, len(bras)), 0)


def rows_at_once(nherm):
    """Rows of (ab|q] that are made together where each bra pair has one primitive pair; as in `block_of_quartets`."""
    return ROWS * np.maximum(1, ROW_BYTES // (ROWS * 8 * LANES * nherm))


class OwnList:
    """Shell pairs with their groups and H matrices: of `md4.engine.PreparedPairs`, what tasks need."""

    def __init__(self, pairs, groups, h):
        self.pairs, self.data, self.made = pairs, groups, h

    def h(self, form):
        """The H matrices."""
        return self.made

    def __len__(self):
        return len(self.pairs)


# Seconds of a vector operation, about.
WORK_SECONDS = 5e-10
# The costs of `work_of`, in vector operations: of [0]^(m) of LANES quartets, of a block, and of an integral of it.
ZEROS_COST, BLOCK_COST, ELEMENT_COST = 60, 100, 6


class Extent(namedtuple("Extent", "l nab nherm npair nprim ngroup vectors elements")):
    """What the work for a list depends on: numbers of `ShellPairs`, of their groups and of elements of H."""

    __slots__ = ()

    @classmethod
    def of(cls, pairs):
        """The extent of `ShellPairs`, which keep it."""
        if "extent" not in pairs.__dict__:
            count, layout = len(functions_of(pairs)[0]), lane_layout(pairs)
            sizes = pairs.l, pairs.nab, count, pairs.npair, pairs.nprim
            pairs.__dict__["extent"] = cls(*sizes, layout.ngroup, layout.vectors, h_elements(pairs))
        return pairs.__dict__["extent"]


def work_of(bra, ket):
    """Work for all quartets of two lists, given by their `Extent`, in vector operations."""
    l = bra.l + ket.l
    first = ZEROS_COST + 8 * l + 2 * nherm(l) + bra.elements * ket.nherm
    per_block = BLOCK_COST + ELEMENT_COST * bra.nab * ket.nab
    return ket.vectors * (bra.nprim * first + bra.npair * bra.nab * ket.elements) + bra.npair * ket.ngroup * per_block


class Lists:
    """The table of lists for compiled loops, and what its addresses point to.

    Parameters
    ----------
    ao_loc : ndarray of int64, optional
        First AO of each shell, for targets that need it.
    places : dict, optional
        (first, of_pair, of_function) of `FIELD` for each prepared list, for targets that need it.
    """

    def __init__(self, ao_loc=None, places=None):
        self.ao_loc, self.places, self.rows, self.numbers, self.kept = ao_loc, places or {}, [], {}, []

    def number(self, prepared):
        """The row of a prepared list, whose H matrices are made if they are missing."""
        if prepared not in self.numbers:
            self.numbers[prepared] = len(self.rows)
            self.rows.append(self.row(prepared))
        return self.numbers[prepared]

    def row(self, prepared):
        """The columns `FIELD` of a list."""
        pairs, groups, h = prepared.pairs, prepared.data, prepared.h(BOTH)
        aos = pairs.pairs if self.ao_loc is None else self.ao_loc[pairs.pairs]
        this = Extent.of(pairs)
        sequence, rows, columns = structure_of(pairs)
        arrays = (
            groups.order, pairs.start, groups.vectors, groups.primitives, groups.lane_primitives, sequence, columns,
            rows, functions_of(pairs)[1], h.flat, h.lanes, aos,
        )  # fmt: skip
        return (
            this.l, this.nab, this.nherm, this.elements, this.npair, groups.ngroup, pairs.na, pairs.nb, pairs.max_prim,
            groups.width, *self.places.get(prepared, (0, 0, 0)), *map(self.address, arrays),
        )  # fmt: skip

    def address(self, array):
        """The address of an array, which is kept."""
        self.kept.append(array)
        return array.ctypes.data

    def table(self):
        """The table, shape (nlist, FIELD.size)."""
        return np.array(self.rows, dtype=np.int64).reshape(-1, FIELD.size)


class Ordered(NamedTuple):
    """A `ListPair` whose bra and ket are chosen so that there is less work."""

    bra: object
    ket: object
    work: float
    swapped: bool
    pair: ListPair

    def seconds(self, per_group=1):
        """Predicted seconds of a block of one bra pair with a group of so many ket pairs."""
        n = len(self.bra)
        blocks = (np.arange(n) // per_group + 1).sum() if self.pair.same else n * -(-len(self.ket) // per_group)
        return WORK_SECONDS * self.work * self.pair.parts / blocks


def by_work(pairs):
    """`Ordered` of all `ListPair`, those of most work first.

    Bounds belong to their lists, so a pair with bounds stays as it is.
    """
    lists = {id(side): side.pairs for pair in pairs for side in pair[:2]}
    extents = np.array([Extent.of(this) for this in lists.values()], dtype=float).reshape(-1, len(Extent._fields)).T
    numbers = dict(zip(lists, range(len(lists))))
    bra, ket = [numbers[id(pair.bra)] for pair in pairs], [numbers[id(pair.ket)] for pair in pairs]
    one, two = Extent(*extents[:, bra]), Extent(*extents[:, ket])
    made = []
    for pair, here, there in zip(pairs, work_of(one, two).tolist(), work_of(two, one).tolist()):
        if pair.same or pair.bra_bound is not None:
            made.append(Ordered(pair.bra, pair.ket, here / (2 if pair.same else 1) / pair.parts, False, pair))
        elif there < here:
            made.append(Ordered(pair.ket, pair.bra, there, True, pair))
        else:
            made.append(Ordered(pair.bra, pair.ket, here, False, pair))
    return sorted(made, key=lambda this: -this.work)


def task_rows(this, lists, most):
    """The tasks of a pair of lists, or of its part, each of at most about `most` work."""
    bra, ket, pair = this.bra, this.ket, this.pair
    addresses = 0, 0
    if pair.bra_bound is not None:
        groups = np.arange(0, len(ket), ket.data.per_group)
        of_groups = np.maximum.reduceat(pair.ket_bound[ket.data.order], groups)
        addresses = lists.address(pair.bra_bound[bra.data.order]), lists.address(of_groups)
    of_lists = lists.number(bra), lists.number(ket)
    of_task = SAME if pair.same else DIFFERENT, *addresses, this.swapped
    if this.work <= most and pair.parts == 1:
        return [(*of_lists, 0, len(bra), *of_task)]
    count = int(min(len(bra), max(1, -(-this.work // most))))
    weight = np.diff(bra.pairs.start)[bra.data.order] + 1
    if pair.same:
        weight *= np.arange(1, len(bra) + 1)
    first, last = part_of(weight, pair.part, pair.parts)
    ends = np.cumsum(weight[first:last])
    if len(ends) == 0:
        return []
    share = ends[-1] / count
    edges = [first, *(first + np.searchsorted(ends, share * np.arange(1, count)) + 1).tolist(), last]
    return [(*of_lists, a, b, *of_task) for a, b in pairwise(edges) if a < b]


def run_lists(backend, pairs, consume, ao_loc=None, tolerance=0.0, report=None, places=None):
    """Makes all blocks of all `ListPair`, and hands them to `consume`.

    Parameters
    ----------
    backend : md4.cpu.backend.CpuBackend
    pairs : list of ListPair
    consume : callable
        (thread, items, tasks, lists, blocks): takes blocks; see `md4.cpu.targets`. It is called by several threads.
    ao_loc, places : optional
        What `Lists` is to hold for `consume`.
    tolerance : float
        Blocks whose bounds multiply to less are left out.
    report : callable, optional
        Is told how much more is done, in predicted seconds of one thread.

    Returns
    -------
    int
        Number of quartets.
    """
    every = by_work(pairs)
    work, lists = sum(this.work for this in every), Lists(ao_loc, places)
    threads = int(max(1, min(number_of_threads(), work // THREAD_WORK)))
    most = work / (TASKS * threads) if threads > 1 else work
    rows = [(row, this) for this in every for row in task_rows(this, lists, most)]
    tasks = np.array([row for row, _ in rows], dtype=np.int64).reshape(-1, TASK.size)
    seconds = None if report is None else np.array([this.seconds(this.ket.data.per_group) for _, this in rows])
    return run_tasks(backend, tasks, lists, threads, consume, tolerance, report, seconds)


def run_tasks(backend, tasks, lists, threads, consume, tolerance=0.0, report=None, seconds=None):
    """As `run_lists`, for a table of tasks; to report, the predicted seconds of a block of each are needed."""
    if len(tasks) == 0:  # parts of lists may be empty
        return 0
    table, counter, told = lists.table(), np.zeros(1, dtype=np.int64), 0.0
    stopped = False
    works = backend.workspaces(threads, task_sizes(table, tasks))
    done = np.zeros(len(works))
    loop, arguments = fill_blocks(backend.operator.kind), (backend.operator.parameter, backend.table)

    def worker(thread):
        nonlocal told
        mine = works[thread]
        while not stopped and (count := loop(tasks, table, counter, tolerance, *arguments, mine)):
            consume(thread, mine.items[:count], tasks, table, mine.out)
            if report is not None:
                done[thread] += seconds[mine.items[:count, 0]].sum()
                if thread == 0:
                    now = float(done.sum())
                    report(now - told)
                    told = now

    def stop():
        nonlocal stopped
        stopped, counter[0] = True, len(tasks)

    for each in works:
        each.state[:] = 0
        each.state[STATE.task] = -1
    run_threads(len(works), worker, stop)
    if report is not None:
        report(float(done.sum()) - told)  # of other threads, since the first one told last
    return sum(int(each.state[STATE.quartets]) for each in works)


def diagonal(backend, prepared, consume):
    """Makes the blocks of all groups of a list with themselves, each pair as bra and ket; see `run_lists`."""
    lists = Lists()
    number = lists.number(prepared)
    tasks = np.array([[number, number, 0, prepared.data.ngroup, DIAGONAL, 0, 0, 0]], dtype=np.int64)
    run_tasks(backend, tasks, lists, 1, consume)
