"""Gradients on the CPU: bounds of derivatives, tasks for threads, and forces on shells; see `md4.cpu.gradient`."""

from functools import cached_property
from itertools import pairwise
from math import sqrt

import numpy as np

from md4.cpu.emit.vectors import LANES
from md4.cpu.gradient import KET, NORM_ROWS, derivative_norms, forces, reverse_sums, workspace, z_tiles
from md4.cpu.groups import Groups, aligned_empty, functions_of, h_elements, plain_layout
from md4.cpu.h_matrices import make_h, numbers_of, room_for, shape_of
from md4.cpu.run import TASKS, THREAD_WORK, WORK_SECONDS, ZEROS_COST, Extent, Lists, OwnList
from md4.cpu.threads import number_of_threads, run_all, run_threads
from md4.errors import MemoryLimitError
from md4.method.angular import nherm
from md4.method.derivatives import OF_A, OF_B
from md4.support.display import size_text
from md4.support.locks import Lock

# Shares of the memory that may be used: of H of the ket lists, and of Z of a task.
H_SHARE, Z_SHARE = 0.5, 0.05
# Most bytes of Z of a task: it is read once after it was made.
Z_BYTES = 8 << 20


class ForceList:
    """What the forces of a list of shell pairs need.

    Parameters
    ----------
    backend : md4.cpu.backend.CpuBackend
        For 1/r, whose bounds are bounds for erf(omega r)/r and erfc(omega r)/r, too.
    given : md4.contract.screening.PairList

    Attributes
    ----------
    derivatives : tuple of int
        By all centres that pairs have: single shells have one.
    largest : ndarray, shape (npair,)
        (sum_ab (ab|ab))^1/2 of the largest derivative of each pair.
    bounds, derivative_bounds : ndarray, shape (npair,)
        f_ab (sum_ab (ab|ab))^1/2, or an upper bound of it, and that of the largest derivative, in the order of the
        groups.
    """

    def __init__(self, backend, given):
        self.given, self.prepared = given, given.prepared
        self.pairs, self.groups = given.prepared.pairs, given.prepared.data
        self.derivatives = OF_A if self.pairs.single else OF_A + OF_B
        self.derived = self.pairs.derived(self.derivatives)
        factor = np.where(self.pairs.pairs[:, 0] == self.pairs.pairs[:, 1], 1.0, 2.0)
        self.largest = largest_norms(backend, self.derived)
        order, rows = self.groups.order, min(self.pairs.na, self.pairs.nb)
        # the norm of all of a matrix from the largest norm of its rows and columns
        self.bounds = (factor * sqrt(rows) * given.exact)[order]
        self.derivative_bounds = (factor * self.largest)[order]

    @cached_property
    def of_groups(self):
        """The largest bound, the sum and the sum of squares of the bounds from each group on, shape (3, ngroup)."""
        edges = np.arange(0, len(self.bounds), self.groups.per_group)
        highest = np.maximum.reduceat(self.bounds, edges)
        sums = [np.add.reduceat(values, edges) for values in (self.bounds, self.bounds**2)]
        found = [np.maximum.accumulate(highest[::-1]), *(np.cumsum(values[::-1]) for values in sums)]
        return np.ascontiguousarray(np.stack(found)[:, ::-1])

    @property
    def count(self):
        """Number of Hermite functions of the derivatives."""
        return len(functions_of(self.derived)[0])


def largest_norms(backend, derived):
    """(sum_ab (ab|ab))^1/2 of the largest derivative of each pair of a list of derivatives, shape (npair,)."""
    found = np.empty(len(derived))
    share = 0.2 * backend.memory.room() / (backend.hermite_bytes(derived) + 1)
    size = max(1, int(min(len(derived), len(derived) * share)))
    for first in range(0, len(derived), size):
        piece = derived[first : first + size]
        groups = Groups.of(piece, plain_layout(piece))  # a pair needs all of its primitives in the same lane
        lists = Lists()
        lists.number(OwnList(piece, groups, make_h(piece, groups, backend.memory)))
        functions, out = piece.na * piece.nb, np.zeros((groups.ngroup, len(piece.derivatives), LANES))
        count, elements = len(functions_of(piece)[0]), h_elements(piece)
        threads = int(max(1, min(number_of_threads(), groups.ngroup)))
        edges = np.linspace(0, groups.ngroup, threads + 1).astype(int).tolist()
        table, triples = lists.table(), functions_of(piece)[1]

        def part_of(thread):
            work = workspace(backend.memory, 2 * piece.l, max(count, NORM_ROWS), 1, 1, 1, elements)
            abq = backend.memory.watch(aligned_empty((NORM_ROWS * count * LANES,)))
            derivative_norms(backend.operator.kind)(
                table, *edges[thread : thread + 2], functions, triples, backend.operator.parameter, backend.table, abq,
                work, out,
            )  # fmt: skip

        run_all(threads, part_of)
        norms = np.sqrt(np.maximum(out, 0.0).max(axis=1)).reshape(-1)[: len(piece)]
        found[first + groups.order] = norms
    return found


class HostForces:
    """Derivatives of sums over all quartets by the centres of the shells.

    Parameters
    ----------
    backend : md4.cpu.backend.CpuBackend
    basis : md4.Basis
    lists : list of md4.contract.screening.PairList
    """

    def __init__(self, backend, basis, lists):
        self.basis, self.lock = basis, Lock()
        self.lists = [ForceList(backend, this) for this in lists]
        self.degree = 1 + 2 * max(this.pairs.l for this in self.lists)

    def run(self, backend, densities, coulomb, exchange, tolerance, part=0, parts=1, report=None):
        """The gradient of E of `md4.cpu.gradient` by the centre of each shell, or a part of its terms.

        Parameters
        ----------
        backend : md4.cpu.backend.CpuBackend
            For the operator.
        densities, coulomb, exchange : ndarray, shapes (n, nao, nao), (n,) and (n,)
        tolerance : float
            Quartets whose bounds are smaller are left out.
        part, parts : int
            The terms are divided into so many parts.
        report : callable, optional
            Is told how much more is done, in predicted seconds of one thread.

        Returns
        -------
        gradient : ndarray, shape (nshell, 3)
        quartets : int
            How many were made; of two different pairs there are two, one for each bra.
        left_out : ndarray, shape (2,)
            The sum of the bounds of those that were left out, and the sum of their squares.
        """
        norms = block_norms(self.basis, densities)
        highest = norms.max(axis=2)
        found = [np.zeros((len(this.pairs), 6)) for this in self.lists]
        left_out, quartets = np.zeros(2), 0
        for these in self.batches(backend):
            lists = Lists(self.basis.ao_loc)
            table, kets = self.tables(lists, these)
            work = [self.work_of(this, these) for this in self.lists]
            threads = int(max(1, min(number_of_threads(), sum(map(np.sum, work)) // THREAD_WORK)))
            tasks = self.tasks(backend, work, threads)[part::parts]
            arguments = table, kets, np.array(these), tolerance, densities, coulomb, exchange, norms, highest
            quartets += self.threads(backend, tasks, threads, arguments, found, left_out, report)
        gradient = np.zeros((self.basis.nshell, 3))
        for this, values in zip(self.lists, found):
            np.add.at(gradient, this.pairs.pairs[:, 0], values[:, :3])
            np.add.at(gradient, this.pairs.pairs[:, 1], values[:, 3:])
        return gradient, quartets, left_out

    def seconds(self):
        """Predicted seconds of one thread, without screening."""
        every = range(len(self.lists))
        return WORK_SECONDS * float(sum(self.work_of(this, every).sum() for this in self.lists))

    def batches(self, backend):
        """Numbers of lists whose H matrices fit the memory at the same time, a batch after the other."""
        room, batch, used = H_SHARE * backend.memory_left(), [], 0
        for number, this in enumerate(self.lists):
            need = backend.hermite_bytes(this.pairs)
            if batch and used + need > room:
                yield batch
                for done in batch:
                    self.lists[done].prepared.drop()
                batch, used = [], 0
            batch.append(number)
            used += need
        yield batch

    def tables(self, lists, these):
        """The tables of lists and of kets for `reverse_lanes`; only the lists `these` have H matrices."""
        for number, this in enumerate(self.lists):
            lists.number(this.prepared if number in these else OwnList(this.pairs, this.groups, NO_MATRICES))
        kets = [
            [lists.address(array) for array in (this.pairs.pairs, this.bounds, *this.of_groups)] for this in self.lists
        ]
        return lists.table(), np.array(kets, dtype=np.int64).reshape(-1, KET.size)

    def work_of(self, this, these):
        """Work of each bra pair of a list, in the order of its groups, in vector operations, without screening."""
        count, nab, of_primitive, of_pair = this.count, this.pairs.nab, 0, 0
        for number in these:
            ket = Extent.of(self.lists[number].pairs)
            l = ket.l + this.derived.l
            of_primitive += ket.vectors * (ZEROS_COST + 8 * l + 2 * nherm(l) + ket.elements * count)
            of_primitive += ket.ngroup * nab * ket.nab * count
            of_pair += 3 * ket.ngroup * nab * ket.nab
        return of_primitive * np.diff(this.pairs.start)[this.groups.order] + of_pair

    def tasks(self, backend, work, threads):
        """(work, list, first and last bra pair), those of most work first."""
        most, room = sum(map(np.sum, work)) / (TASKS * threads), min(Z_BYTES, Z_SHARE * backend.memory_left())
        found = []
        for number, (this, of_pairs) in enumerate(zip(self.lists, work)):
            most_prims = max(1, room // (8 * this.pairs.nab * this.count))
            prims = np.diff(this.pairs.start)[this.groups.order]
            share = np.cumsum(np.maximum(of_pairs / max(most, 1.0), prims / most_prims))
            edges = [0, *(np.flatnonzero(np.diff(np.floor(share))) + 1).tolist(), len(prims)]
            found += [(float(of_pairs[a:b].sum()), number, a, b) for a, b in pairwise(edges) if a < b]
        return sorted(found, reverse=True)

    def threads(self, backend, tasks, threads, arguments, found, left_out, report):
        """Does tasks, by several threads; returns the number of quartets."""
        left, done = tasks[::-1], [0]

        def worker(_):
            work = self.workspace(backend)
            while left:
                try:
                    seconds, number, first, last = left.pop()
                except IndexError:  # another thread took it
                    return
                without = np.zeros(2)
                of_pairs, count = self.bra(backend, number, first, last, arguments, work, without)
                with self.lock:
                    these = self.lists[number].groups.order[first:last]
                    found[number][these] += of_pairs
                    np.add(left_out, without, out=left_out)
                    done[0] += count
                    if report is not None:
                        report(WORK_SECONDS * seconds)

        run_threads(max(1, min(threads, len(tasks))), worker, left.clear)
        return done[0]

    def workspace(self, backend):
        """Memory of a thread."""
        most = {name: 0 for name in ("u", "gamma", "z", "elements", "functions")}
        nab, count = (max(n) for n in zip(*((this.pairs.nab, this.count) for this in self.lists)))
        most_z = max(this.pairs.max_prim * this.pairs.nab * this.count for this in self.lists)
        widest = int(np.diff(self.basis.ao_loc).max())
        elements = max(h_elements(this.pairs) for this in self.lists)
        sizes = self.degree, nab * count, nab * nab, widest, most_z, elements
        need = 8 * LANES * (nab * count + nab * nab + most_z)
        if need > backend.memory_left():
            raise MemoryLimitError(
                f"the workspace of one thread for gradients takes {size_text(need)}, but "
                f"{size_text(backend.memory_left())} may be used; raise max_memory."
            )
        return workspace(backend.memory, *sizes)

    def bra(self, backend, number, first, last, arguments, work, left_out):
        """(gradient of each of some bra pairs, shape (npair, 6), number of quartets)."""
        table, kets, these, tolerance, *densities = arguments
        this = self.lists[number]
        prims = this.groups.primitives_of(this.pairs.start, first, last)
        vectors = -(-len(prims) // LANES)
        z = np.zeros((vectors, this.pairs.nab, this.count, LANES))
        operator = backend.operator
        quartets = reverse_sums(operator.kind)(
            number, first, last, table, kets, these, this.derivative_bounds, functions_of(this.derived)[1],
            z_tiles(*this.derived.shell_class, this.derived.single, this.derivatives), tolerance, operator.parameter, backend.table, *densities, work, z.reshape(-1), left_out,
        )  # fmt: skip
        members = np.full(vectors * LANES, -1)
        members[: len(prims)] = prims
        shape = shape_of(*this.derived.shell_class, this.derived.single, this.derivatives)
        of_prims = np.zeros((vectors, len(this.derivatives), LANES))
        room = room_for(this.derived, shape)
        forces()(
            numbers_of(this.pairs.primitives), members.reshape(-1, LANES), this.pairs.la, this.pairs.lb, shape, 0,
            vectors, z.reshape(-1), of_prims.reshape(-1), room.ctypes.data,
        )  # fmt: skip
        counts = np.diff(this.pairs.start)[this.groups.order[first:last]]
        of_pairs = np.zeros((last - first, 6))
        values = of_prims.transpose(0, 2, 1).reshape(-1, len(this.derivatives))[: len(prims)]
        np.add.at(of_pairs[:, : len(this.derivatives)], np.repeat(np.arange(last - first), counts), values)
        return of_pairs, quartets


class NoMatrices:
    """In place of the H matrices of a list that is no ket."""

    flat = lanes = np.empty(0)


NO_MATRICES = NoMatrices()


def block_norms(basis, densities):
    """|D_ab| of the blocks of each density, shape (n, nshell, nshell)."""
    first = basis.ao_loc[:-1]
    squares = np.add.reduceat(np.add.reduceat(densities**2, first, axis=1), first, axis=2)
    return np.sqrt(squares)
