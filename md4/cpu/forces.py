"""Gradients on the CPU: bounds of derivatives, tasks for threads, and forces on shells; see `md4.cpu.gradient`."""

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import sqrt

import numpy as np

from md4.cpu.emit.vectors import LANES
from md4.cpu.gradient import KET, NORM_ROWS, derivative_norms, forces, reverse_sums, workspace, workspace_bytes, z_tiles
from md4.cpu.groups import BLOCK, FIELD, Groups, aligned_empty, functions_of, h_elements, plain_layout
from md4.cpu.h_matrices import HMatrices, h_bytes, make_h, numbers_of, pieces, room_bytes, room_for, shape_of
from md4.cpu.hermite_coulomb import Side, side_bytes
from md4.cpu.run import TASKS, THREAD_WORK, WORK_SECONDS, ZEROS_COST, Extent, Lists, OwnList
from md4.cpu.threads import in_parts, number_of_threads, run_threads, taken_from
from md4.method.angular import nherm
from md4.method.derivatives import OF_A, OF_B
from md4.plan import groups_within, own_ranges
from md4.shells.schwarz import ROUNDING, GradientBounds
from md4.support.locks import Lock

# Shares of the memory that may be used: of H of the ket lists, of H of derivatives for their norms, and of the
# workspaces of all threads.
H_SHARE, NORM_SHARE, WORK_SHARE = 0.5, 0.2, 0.2
# Most bytes of Z of a task: it is read once after it was made. That of one bra pair may be larger.
Z_BYTES = 8 << 20


# In place of the H matrices of a list that is no ket.
NO_MATRICES = HMatrices(np.empty(0), np.empty(0))


class ForceList:
    """What the forces of a list of shell pairs need.

    Parameters
    ----------
    backend : md4.cpu.backend.CpuBackend
        For 1/r, whose bounds are bounds for erf(omega r)/r and erfc(omega r)/r, too.
    basis : md4.Basis
    given : md4.contract.screening.PairList

    Attributes
    ----------
    derivatives : tuple of int
        By all centres that pairs have: single shells have one.
    largest : ndarray, shape (npair,)
        Bounds of (sum_ab (ab|ab))^1/2 of the largest derivative of each pair.
    of_pairs : md4.shells.schwarz.GradientBounds
    bounds, derivative_bounds : ndarray, shape (npair,)
        The same in the order of the groups.
    """

    def __init__(self, backend, basis, given):
        self.given, self.prepared = given, given.prepared
        self.pairs, self.groups = given.prepared.pairs, given.prepared.data
        self.derivatives = OF_A if self.pairs.single else OF_A + OF_B
        self.derived = self.pairs.derived(self.derivatives)
        self.largest = largest_norms(backend, self.derived)
        if basis.alternating[self.pairs.pairs].any():  # as R, so that cancellation hides nothing
            self.largest = np.hypot(self.largest, sqrt(ROUNDING) * largest_norms(backend, of_moduli(self.derived)))
        # the norm of all of a matrix from the largest norm of its rows and columns
        norms = sqrt(min(self.pairs.na, self.pairs.nb)) * given.exact
        self.of_pairs = made = GradientBounds(self.pairs.pairs, basis.centres, norms, self.largest)
        self.bounds, self.derivative_bounds = made.own[self.groups.order], made.derivative[self.groups.order]

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


def of_moduli(pairs):
    """`ShellPairs` with the moduli of contraction coefficients."""
    moduli = {name: abs(getattr(pairs.primitives, name)) for name in ("coef_a", "coef_b")}
    return replace(pairs, primitives=replace(pairs.primitives, **moduli))


def largest_norms(backend, derived):
    """Bounds of (sum_ab (ab|ab))^1/2 of the largest derivative of each pair of a list of derivatives, (npair,)."""
    found = np.empty(len(derived))
    whole = plain_layout(derived)  # a pair needs all of its primitives in the same lane
    for where in pieces(derived, whole, NORM_SHARE * backend.memory.room()):
        piece = derived[where]
        layout = whole if len(piece) == len(derived) else plain_layout(piece)
        need = h_bytes(piece, layout) + norm_bytes(piece)
        backend.check_fits(need, "lists of shell pairs and bounds of the derivatives of one of these take")
        groups = Groups.of(piece, layout)
        norms = norms_of(backend, OwnList(piece, groups, make_h(piece, groups, backend.memory)))
        found[where.start + groups.order] = norms.max(axis=1).reshape(-1)[: len(piece)]
    return found


def norms_of(backend, piece):
    """Norms of each derivative of an `OwnList`, shape (ngroup, nderivative, LANES), by all threads."""
    pairs, lists = piece.pairs, Lists()
    lists.number(piece)
    count, functions = len(functions_of(pairs)[0]), pairs.na * pairs.nb
    out = np.zeros((piece.data.ngroup, len(pairs.derivatives), LANES))
    table, operator, memory = lists.table(), backend.operator, backend.memory

    def make(first, last):
        work = workspace(memory, *norm_sizes(pairs))
        abq = memory.empty((NORM_ROWS * count * LANES,), aligned_empty)
        derivative_norms(operator.kind)(
            table, first, last, functions, functions_of(pairs)[1], operator.parameter, backend.table, abq, work, out
        )

    in_parts(len(out), int(min(len(out), backend.memory_left() // norm_bytes(pairs))), make)
    return out


def norm_sizes(pairs):
    """What `workspace` is asked for each thread of `norms_of`."""
    return 2 * pairs.l, max(len(functions_of(pairs)[0]), NORM_ROWS), 1, 1, 1, h_elements(pairs)


def norm_bytes(pairs):
    """Bytes that each thread of `norms_of` takes."""
    return workspace_bytes(*norm_sizes(pairs)) + 8 * LANES * NORM_ROWS * len(functions_of(pairs)[0])


class HostForces:
    """Derivatives of sums over all quartets by the centres of the shells.

    Parameters
    ----------
    backend : md4.cpu.backend.CpuBackend
    basis : md4.Basis
    lists : list of md4.contract.screening.PairList

    Attributes
    ----------
    loop : callable
        The loop for a kind of operator; all of them have the arguments of `reverse_lanes`.
    beside : tuple
        Lists of builds that are others; there are none.
    """

    loop, beside = staticmethod(reverse_sums), ()

    def __init__(self, backend, basis, lists):
        self.backend, self.basis, self.lock = backend, basis, Lock()
        self.lists = [ForceList(backend, basis, this) for this in lists]
        self.degree = 1 + 2 * max(this.pairs.l for this in self.lists)
        self.bounds = [this.of_pairs for this in self.lists]

    def run(
        self, backend, densities, norms, coulomb, exchange, tolerance, part=0, parts=1, report=None, meanwhile=None
    ):  # fmt: skip
        """The gradient of E of `md4.cpu.gradient` by the centre of each shell, or a part of its terms.

        Parameters
        ----------
        backend : md4.cpu.backend.CpuBackend
            For the operator.
        densities, norms : ndarray, shapes (n, nao, nao) and (n, nshell, nshell)
            With the `md4.shells.schwarz.block_norms` of each.
        coulomb, exchange : ndarray, shape (n,)
        tolerance : float
            Quartets whose bounds are smaller are left out.
        part, parts : int
            The terms are divided into so many parts.
        report : callable, optional
            Is told how much more is done, in predicted seconds of one thread.
        meanwhile : callable, optional
            May be called once, where this thread would wait for a device.

        Returns
        -------
        gradient : ndarray, shape (nshell, 3)
        quartets : int
            How many were made; of two different pairs there are two, one for each bra.
        left_out : ndarray, shape (2,)
            The sum of the bounds of those that were left out, and the sum of their squares.
        """
        found = [np.zeros((len(this.pairs), 6)) for this in self.lists]
        left_out, quartets = np.zeros(2), 0
        for d, of_blocks, j, k in divided(densities, norms, coulomb, exchange):
            most, batches = self.divided_memory(backend, range(len(self.lists)), densities.nbytes, not k.any())
            for these in batches:
                lists = Lists(self.basis.ao_loc)
                numbers, *tables = self.tables(lists, these, None if k.any() else d[0])
                work = [self.work_of(this, these) for this in self.lists]
                threads = int(max(1, min(most, sum(map(np.sum, work)) // THREAD_WORK)))
                tasks = self.tasks(work, threads, part, parts)
                arguments = *tables, numbers, tolerance, (d, j, k, of_blocks, of_blocks.max(axis=2))
                quartets += self.threads(backend, tasks, threads, arguments, found, left_out, report)
        return self.by_centres(found), quartets, left_out

    @staticmethod
    def has_digits_of_matrices(_norms, _tolerance):
        """Whether J of derivatives is exact enough; see `md4.gpu.coulomb_forces.CoulombBounds`."""
        return True

    @staticmethod
    def passes(_norms, coulomb, exchange, _tolerance):
        """How often `run` goes through all quartets: J alone is made of one density after the other."""
        return min(1, len(coulomb)) if exchange.any() else len(coulomb)

    def by_centres(self, found):
        """Sums by the centre of each shell, shape (nshell, 3), from those of the pairs of each list, (npair, 6)."""
        gradient = np.zeros((self.basis.nshell, 3))
        for this, values in zip(self.lists, found):
            np.add.at(gradient, this.pairs.pairs[:, 0], values[:, :3])
            np.add.at(gradient, this.pairs.pairs[:, 1], values[:, 3:])
        return gradient

    def seconds(self):
        """Predicted seconds of one thread, without screening."""
        every = range(len(self.lists))
        return WORK_SECONDS * float(sum(self.work_of(this, every).sum() for this in self.lists))

    def drop(self):
        """Gives back the H matrices of the lists."""
        for this in self.lists:
            this.prepared.drop()

    def batches(self, numbers, needs, most):
        """Those of the lists `numbers` whose `needs` fit `most` bytes at the same time, a batch after the other."""
        for group in groups_within(needs, most):
            yield [numbers[n] for n in group]
            for n in group if group.stop < len(needs) else ():
                self.lists[numbers[n]].prepared.drop()

    def tables(self, lists, these, density=None):
        """The numbers of the ket lists `these`, and tables of lists and of kets for `reverse_lanes`.

        Kets have H matrices, or with a density the D_q of it in their place.
        """
        for number, this in enumerate(self.lists):
            with_h = number in these and density is None
            lists.number(this.prepared if with_h else OwnList(this.pairs, this.groups, NO_MATRICES))
        if density is not None:
            for number in these:
                side = Side(self.backend.memory, self.basis, self.lists[number].prepared, 2 * density[None])
                lists.rows.append(density_row(lists.rows[number], lists, side.lane_density))
        kets = [
            [lists.address(array) for array in (this.pairs.pairs, this.bounds, *this.of_groups)]
            for this in [*self.lists, *(self.lists[number] for number in these if density is not None)]
        ]
        numbers = these if density is None else range(len(self.lists), len(lists.rows))
        return np.array(numbers), lists.table(), np.array(kets, dtype=np.int64).reshape(-1, KET.size)

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

    def tasks(self, work, threads, part=0, parts=1):
        """(work, list, first and last bra pair) of a part, those of most work first.

        Which pairs belong to a part does not depend on threads or memory, which may differ between processes.
        """
        most, found = max(1.0, sum(map(np.sum, work)) / (TASKS * threads)), []
        for number, (this, of_pairs, own) in enumerate(zip(self.lists, work, self.own_pairs(part, parts))):
            most_prims = max(1, Z_BYTES // (8 * (this.pairs.nab * this.count + 3 * len(this.derivatives) + 4)))
            prims = np.diff(this.pairs.start)[this.groups.order]
            share = np.cumsum(np.maximum(of_pairs / most, prims / most_prims))
            ends = np.flatnonzero((np.diff(np.floor(share)) != 0) | (np.diff(own.astype(int)) != 0)) + 1
            edges = [0, *ends.tolist(), len(prims)]
            found += [(float(of_pairs[a:b].sum()), number, a, b) for a, b in pairwise(edges) if a < b and own[a]]
        return sorted(found, reverse=True)

    def own_pairs(self, part, parts):
        """Which pairs of each list, in the order of its groups, belong to a part; parts have short lists in turn."""
        return [is_own(this.groups.order, len(this.pairs), (part + number) % parts, parts)
                for number, this in enumerate(self.lists)]  # fmt: skip

    def threads(self, backend, tasks, threads, arguments, found, left_out, report):
        """Does tasks, by several threads; returns the number of quartets."""
        left, done = tasks[::-1], [0]

        def worker(_):
            work = workspace(backend.memory, *self.sizes)
            for seconds, number, first, last in taken_from(left):
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

    @cached_property
    def sizes(self):
        """What `workspace` is asked for each thread: the most that any two lists need."""
        nab, count = (max(n) for n in zip(*((this.pairs.nab, this.count) for this in self.lists)))
        most_z = max(this.pairs.max_prim * this.pairs.nab * this.count for this in self.lists)
        elements = max(h_elements(this.pairs) for this in self.lists)
        return self.degree, nab * count, nab * nab, int(np.diff(self.basis.ao_loc).max()), most_z, elements

    def workspace_bytes(self):
        """Bytes of the workspace of a thread."""
        of_z = max(min(max(Z_BYTES, most), of_list) for most, of_list in map(self.z_bytes, self.lists))
        return workspace_bytes(*self.sizes) + of_z + max(room_bytes(this.derived) for this in self.lists)

    @staticmethod
    def z_bytes(this):
        """Bytes of Z, and of what is made of it, for the longest pair of a list, and for all of the list."""
        of_primitive = 8 * (this.pairs.nab * this.count + 3 * len(this.derivatives) + 4)
        return [of_primitive * (n + LANES) for n in (this.pairs.max_prim, this.pairs.nprim)]

    def divided_memory(self, backend, kets, of_densities=0, alone=False):
        """How many threads there is memory for, and the `batches` of ket lists; `alone`: J, which takes D of each list.

        MemoryLimitError if for no thread or no list, before Z, H and tables are allocated.
        """
        kept = sum(this.prepared.h_bytes for this in self.lists)
        work, left = self.workspace_bytes(), backend.memory_left() + kept
        needs = [backend.hermite_bytes(self.lists[number].pairs) for number in kets]
        if alone:
            needs = [need + side_bytes(self.lists[number].pairs) for need, number in zip(needs, kets)]
        backend.check_fits(
            work + of_densities + max(needs) - kept, f"gradients of {self.basis!r} with lists of shell pairs, "
            "densities, H matrices of one list and the workspace of a thread take at least",
        )  # fmt: skip
        most = min(WORK_SHARE * left, left - of_densities - max(needs))
        threads = max(1, int(min(number_of_threads(), most // work)))
        most = min(H_SHARE * left, left - of_densities - threads * work)
        if sum(needs) > most:
            self.drop()
        return threads, self.batches(kets, needs, most)

    def bra(self, backend, number, first, last, arguments, work, left_out):
        """(gradient of each of some bra pairs, shape (npair, 6), number of quartets)."""
        table, kets, these, tolerance, terms = arguments
        this = self.lists[number]
        prims = this.groups.primitives_of(this.pairs.start, first, last)
        vectors = -(-len(prims) // LANES)
        z = backend.memory.zeros((vectors, this.pairs.nab, this.count, LANES))
        operator = backend.operator
        tiles = z_tiles(*this.derived.shell_class, this.derived.single, this.derivatives)
        quartets = self.loop(operator.kind)(
            number, first, last, table, kets, these, this.derivative_bounds, functions_of(this.derived)[1], tiles,
            tolerance, operator.parameter, backend.table, terms, work, z.reshape(-1), left_out,
        )  # fmt: skip
        members = np.full(vectors * LANES, -1)
        members[: len(prims)] = prims
        shape = shape_of(*this.derived.shell_class, this.derived.single, this.derivatives)
        of_prims = np.zeros((vectors, len(this.derivatives), LANES))
        room = room_for(this.derived, backend.memory)
        forces()(
            numbers_of(this.pairs.primitives), members.reshape(-1, LANES), this.pairs.la, this.pairs.lb, shape, 0,
            vectors, z.reshape(-1), of_prims.reshape(-1), room.ctypes.data,
        )  # fmt: skip
        counts = np.diff(this.pairs.start)[this.groups.order[first:last]]
        of_pairs = np.zeros((last - first, 6))
        values = of_prims.transpose(0, 2, 1).reshape(-1, len(this.derivatives))[: len(prims)]
        np.add.at(of_pairs[:, : len(this.derivatives)], np.repeat(np.arange(last - first), counts), values)
        return of_pairs, quartets


def is_own(numbers, count, part, parts):
    """Which of some numbers below `count` belong to a part; see `own_ranges`."""
    own = np.zeros(count, dtype=bool)
    for where in own_ranges(count, part, parts):
        own[where] = True
    return own[numbers]


def divided(*terms):
    """The terms of gradients, exchange last, that are made together: all, or without exchange each density alone."""
    if terms[-1].any():
        yield terms
        return
    for s in range(len(terms[0])):
        yield tuple(array[s : s + 1] for array in terms)


def density_row(row, lists, density):
    """The row of a list with its density in lanes as one row of H, shape (1, nvector, nherm, LANES)."""
    count = row[FIELD.nherm]
    edges = np.append(np.arange(0, count, BLOCK), count).astype(np.int32)
    sequence, columns = np.zeros(1, dtype=np.int64), np.arange(count, dtype=np.int32)
    made = list(row)
    made[FIELD.nab], made[FIELD.nb], made[FIELD.elements] = 1, 0, count
    made[FIELD.sequence], made[FIELD.columns] = lists.address(sequence), lists.address(columns)
    made[FIELD.rows], made[FIELD.lane_h] = lists.address(edges), lists.address(density)
    return tuple(made)
