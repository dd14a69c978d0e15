"""Where the three-centre tensor B is between builds: on the device, in host memory, or nowhere.

B[Q, c] = sum_P W[Q, P] (P|c) with W of `md4.contract.metric`; c is a pair of AOs, a column of
`md4.contract.three_centre.ThreeCentre`. The rows are those of PySCF: P is in the order of the auxiliary basis. A table
has more columns, of zeros: all pairs that are left out refer to the first of them.
"""

import numpy as np

from md4.contract.three_centre import HERMITE_SHARE, ranges_between
from md4.contract.workspace import least_block
from md4.support.display import size_text
from md4.support.memory import check_fits

STORES = ("auto", "device", "host", "direct")
# Of the memory that is left: what a table leaves to the products, and what these take at most at once.
WORK_SHARE = 0.5
# For each element of a matrix over AOs: a row of columns as a matrix, its products with orbitals twice, and a quarter.
PRODUCT_BYTES = 30
# Of the same: what H matrices of slices of lists take at most, while there are no products yet.
H_SHARE = 0.75
# The width of a table is a multiple of this, so that rows begin at lines of the cache.
ALIGNED = 16


def zeros(algebra, shape):
    """An array of zeros on the device."""
    made = algebra.empty(shape)
    made[...] = 0.0
    return made


def block_rows(algebra, row_bytes, most=None):
    """How many rows of the tensor to work on at once, of so many bytes each; MemoryLimitError if not even one fits."""
    left = algebra.memory_left()
    algebra.check_fits(row_bytes, "density fitting with one auxiliary function at a time needs")
    return max(1, int(min(algebra.block_bytes if most is None else most, WORK_SHARE * left) // row_bytes))


def parts_within(ranges, budget):
    """Lists of (key, first, last), parts of ranges (key, first, last, size of one), of which each list has a budget.

    One of a range is taken if the budget is smaller.
    """
    groups, room = [], 0
    for key, begin, last, size in ranges:
        first = begin
        while first < last:
            if room < size:
                groups.append([])
                room = max(budget, size)
            end = min(last, first + room // size)
            groups[-1].append((key, first, end))
            first, room = end, room - size * (end - first)
    return groups


def row_blocks(algebra, table, cuts, on_host):
    """Yields (first, rows on the device) of ranges of rows (first, last) of a table on the device or on the host."""
    if on_host:
        yield from algebra.row_blocks(table, cuts)
    else:
        yield from ((first, table[first:last]) for first, last in cuts)


class Columns:
    """Chunks of columns (P|ij), and of B, as they are made.

    Parameters
    ----------
    three : md4.contract.three_centre.ThreeCentre
    metric : md4.contract.metric.Metric
    algebra : md4.backends.Algebra
    """

    def __init__(self, three, metric, algebra):
        self.three, self.metric, self.algebra = three, metric, algebra
        self.places = algebra.send(np.argsort(three.auxiliary_order))
        orbital, *single = three.ranges
        # Bytes that the engine needs, with H of single shells, and those of a row of columns as a matrix in products.
        self.workspace = least_block(three.engine, orbital, orbital, *single) + PRODUCT_BYTES * three.nao**2
        self.workspace += max(map(three.store.size, three.prepared[1]), default=0)
        # The same, and the two buffers for the longest chunk that cannot be cut.
        self.least_bytes = self.workspace + 16 * three.naux * int(np.diff(three.edges).max(initial=0))

    def cuts(self, first=0, last=None):
        """Where chunks of some columns begin and end: at edges, of about `chunk_bytes`, or what there is memory for."""
        column, room = 16 * max(1, self.three.naux), WORK_SHARE * (self.algebra.memory_left() - self.workspace)
        both = column + WORK_SHARE / H_SHARE * self.hermite_bytes()
        most = max(1, int(min(self.algebra.chunk_bytes // column, room // both)))
        return ranges_between(self.three.edges, first, self.three.ncol if last is None else last, most)

    def hermite_bytes(self):
        """Bytes for a column of H matrices that are not kept: a CPU makes those of a slice of a list with a chunk."""
        store, (lists, single) = self.three.store, self.three.prepared
        if self.three.engine.backend.name != "cpu":
            return 0
        room = store.limit - max(map(store.size, single), default=0)
        sizes = ((store.size(this), len(this) * this.facts.nab) for this in lists)
        return max((size / columns for size, columns in sizes if size > room), default=0)

    def chunks(self, *ranges):
        """Yields (first, last, (P|ij)) with P in the order of the auxiliary basis; valid until the next one.

        Chunks do not cross the ends of `ranges` of columns (first, last), which are edges; all columns by default.
        """
        self.three.store.fit(HERMITE_SHARE)  # tables and products may have taken memory since it was made
        cuts, naux = [cut for ends in ranges or [()] for cut in self.cuts(*ends)], self.three.naux
        what = f"the integrals of one pair of shells with {naux} auxiliary functions and the least workspace take"
        self.algebra.check_fits(self.least_bytes, what)
        longest = max((last - first for first, last in cuts), default=0)
        made, sorted_ = self.algebra.empty((naux * longest,)), self.algebra.empty((naux * longest,))
        for first, last in cuts:
            shape = naux, last - first
            raw, out = (buffer[: naux * (last - first)].reshape(shape) for buffer in (made, sorted_))
            self.three.integrals(first, last, out=raw)
            self.algebra.await_copies()  # of what was in `out`
            yield first, last, self.algebra.sorted_rows(raw, self.places, out)

    def solved(self):
        """Yields (first, last, B)."""
        for first, last, chunk in self.chunks():
            yield first, last, self.metric.apply(chunk)


class Table:
    """B in memory, made once.

    Parameters
    ----------
    columns : Columns
    kind : {'device', 'host'}
    """

    def __init__(self, columns, kind):
        self.kind, self.algebra = kind, columns.algebra
        ncol = columns.three.ncol
        shape = columns.metric.size, table_width(ncol)
        self.table = self.algebra.empty(shape) if kind == "device" else self.algebra.host_table(shape)
        self.table[:, ncol:] = 0.0
        for first, last, part in columns.solved():
            if kind == "device":
                self.table[:, first:last] = part
            else:
                self.algebra.put_columns(part, self.table, first)
        self.algebra.await_copies()

    @property
    def copies(self):
        """Numbers on the device, while it works with a row, of copies of that row."""
        return 2 * self.table.shape[1] if self.kind == "host" else 0

    def blocks(self, first, last, most):
        """Yields (number of the first row, rows on the device) of at most so many of the rows from first to last."""
        cuts = [(n, min(n + most, last)) for n in range(first, last, most)]
        return row_blocks(self.algebra, self.table, cuts, self.kind == "host")


def table_bytes(rows, columns):
    """Bytes of a `Table`."""
    return 8 * rows * table_width(columns)


def table_width(columns):
    """Numbers of a row of a `Table`."""
    return (columns // ALIGNED + 1) * ALIGNED


def chosen_store(store, algebra, shape, work):
    """'device', 'host' or 'direct' for a tensor.

    Parameters
    ----------
    store : str
        What the caller asks for, one of STORES.
    algebra : md4.backends.Algebra
    shape : (int, int)
        Rows and columns.
    work : int
        Bytes that builds need beside the tensor.

    Raises
    ------
    MemoryLimitError
        What the caller asks for does not fit.
    """
    need, left = table_bytes(*shape), algebra.memory_left()
    here = min(left, algebra.host_left()) if store == "host" else left
    on_host = need + work <= algebra.host_left() and work <= left
    fits = {"device": algebra.held_bytes(need) + work <= left, "host": on_host}
    if store == "auto":
        return "device" if fits["device"] else "host" if algebra.has_host_memory and fits["host"] else "direct"
    if store in fits and not fits[store]:
        others = [repr(name) for name in ("device", "host", "direct") if name != store and fits.get(name, True)]
        what = f"the three-centre tensor of {shape[0]} auxiliary functions and {shape[1]} pairs of AOs takes "
        what += f"{size_text(need)} and its builds {size_text(work)}; store={store!r} needs"
        both = work + (algebra.held_bytes(need) if store == "device" else need)
        remedy = f"raise max_memory, or use store={' or '.join(others)}"
        if store == "device" or not algebra.has_host_memory:
            algebra.check_fits(both, what, remedy)  # names what is held, too
        check_fits(both, here, what, remedy)
    return store
