"""J alone on the CPU, in the Hermite basis: r of LANES primitive quartets times the densities of both sides.

See `md4.method.hermite_coulomb`. The bra has no sign here: its D and J are in the basis of H without (-1)^|p|, while
the densities of kets include it.
"""

import numpy as np

from md4.cpu.compile import Loop
from md4.cpu.emit.recurrence import recur
from md4.cpu.emit.vectors import (
    LANES,
    broadcast,
    doubles,
    fma,
    integers,
    lane_doubles,
    lane_halves,
    load,
    multiply,
    store,
    subtract,
    total,
    view,
)
from md4.cpu.emit.zeros import zeros_of
from md4.cpu.groups import FIELD, PRIMITIVE, SAME, TASK, aligned_empty, lane_layout, structure_of
from md4.cpu.h_matrices import BOTH
from md4.cpu.integrals import cube_places, make_products, quartet_count, side_of_cube
from md4.cpu.run import TASKS, THREAD_WORK, Lists, by_work, task_rows, task_sizes
from md4.cpu.threads import number_of_threads, run_threads, taken_from
from md4.method.hermite_coulomb import pair_places, pair_weights, signs
from md4.support.locks import Lock, once

# Most work of a task, in vector operations: an interrupt waits for its end.
TASK_WORK = 3e8
products, lane_products = make_products("row", False, 1), make_products("lane_row", True, 1)
zeros_of_lanes = None  # set by `contract_r`, for one operator


def contract_lanes(task, lists, tolerance, parameter, table, d_bra, d_ket, j_bra, j_ket, sums, work):
    """Multiplies r[p+q] of a task by the densities of both sides.

    Parameters
    ----------
    d_bra, d_ket : ndarray
        Densities of the whole lists, shapes (n, nprim, N_p) and (n, nvector, N_q, LANES).
    j_bra, j_ket : ndarray
        Are added to. `j_bra` has rows for the primitive pairs of the task's bra pairs only, in their sorted order.
    sums : ndarray, shape (n, N_p, LANES)
        Memory of this thread.

    Returns
    -------
    int
        Number of quartets.
    """
    bra, ket = lists[task[TASK.bra]], lists[task[TASK.ket]]
    l, p_count, q_count = bra[FIELD.l] + ket[FIELD.l], bra[FIELD.nherm], ket[FIELD.nherm]
    nprim, nvector, side = d_bra.shape[1], d_ket.shape[1], side_of_cube(l)
    cube_places(bra, side, work.of_p)
    cube_places(ket, side, work.column_q)
    order, start = integers(bra[FIELD.order], 1), integers(bra[FIELD.start], 1)
    vectors = integers(ket[FIELD.vectors], 1)
    bra_data, ket_data = doubles(bra[FIELD.primitives], 1), doubles(ket[FIELD.lane_primitives], 1)
    same, weights = task[TASK.same] == SAME, lane_doubles()
    bra_bound, ket_bound = doubles(task[TASK.bra_bound], 1), doubles(task[TASK.ket_bound], 1)
    flat_bra, flat_ket = view(d_bra, 0, d_bra.size), view(d_ket, 0, d_ket.size)
    flat_j, flat_sums = view(j_ket, 0, j_ket.size), view(sums, 0, sums.size)
    all_p, all_q = lane_halves(), lane_halves()  # one row
    all_p[0], all_p[1], all_q[0], all_q[1] = 0, p_count, 0, q_count
    width, row, quartets = ket[FIELD.width], 0, 0
    per_group = LANES // width
    one, zero, step, more = np.int64(1), np.int64(0), np.int64(LANES), l >= 0  # see `block_of_quartets`
    for n in range(task[TASK.first], task[TASK.last]):
        last_group = n // per_group + 1 if same else ket[FIELD.ngroup]
        for i in range(start[order[n]], start[order[n] + 1]):
            for at in range(0, sums.size, LANES):
                store(flat_sums, at, broadcast(0.0))
            for g in range(last_group):
                if not bra_bound[n] * ket_bound[g] >= tolerance:
                    continue
                for lane in range(LANES):
                    m = g * per_group + lane // width
                    weights[lane] = 1.0 if not same or m < n else (0.5 if m == n else 0.0)
                if i == start[order[n]]:
                    quartets += quartet_count(n, g, ket[FIELD.npair], per_group, same)
                weight = load(weights, 0)
                for v in range(vectors[g], vectors[g + 1]):
                    at_p, at_q = i * PRIMITIVE.size, v * PRIMITIVE.size * LANES
                    rz = subtract(broadcast(bra_data[at_p + 1]), load(ket_data, at_q + LANES))
                    ry = subtract(broadcast(bra_data[at_p + 2]), load(ket_data, at_q + 2 * LANES))
                    rx = subtract(broadcast(bra_data[at_p + 3]), load(ket_data, at_q + 3 * LANES))
                    r2 = fma(rz, rz, fma(ry, ry, multiply(rx, rx)))
                    zeros_of_lanes(
                        l, broadcast(bra_data[at_p]), load(ket_data, at_q), r2, parameter, table, work.axis, work.zeros
                    )
                    for m in range(l + 1):
                        store(work.zeros, m * LANES, multiply(weight, load(work.zeros, m * LANES)))
                    recur(l, side, work.zeros, rz, ry, rx, work.axis, work.r)
                    for s in range(len(d_bra)):
                        lane_products(
                            flat_ket, (s * nvector + v) * q_count, work.column_q, all_q, one, p_count, work.r,
                            work.of_p, flat_sums, s * p_count * step, work.numbers, zero, work.numbers, step, more,
                        )  # fmt: skip
                        products(
                            flat_bra, (s * nprim + i) * p_count, work.of_p, all_p, one, q_count, work.r,
                            work.column_q, flat_j, (s * nvector + v) * q_count * step, work.numbers, zero, work.numbers,
                            step, more,
                        )  # fmt: skip
            for s in range(len(d_bra)):
                for p in range(p_count):
                    j_bra[s, row, p] += total(load(flat_sums, (s * p_count + p) * LANES))
            row += 1
    return quartets


@once
def contract_r(kind):
    """`contract_lanes` for one operator."""
    return Loop(contract_lanes, f"contract_{kind}", zeros_of_lanes=zeros_of(kind))


def side_bytes(pairs):
    """Bytes of a `Side` for one density matrix."""
    return 16 * pairs.nherm * (pairs.nprim + LANES * lane_layout(pairs).vectors)


class Side:
    """D and J of a whole list in the Hermite basis: by primitive pair, and in lanes, where they have the sign.

    Parameters
    ----------
    memory : md4.support.memory.HostMemory
    basis : md4.Basis
    prepared : md4.engine.PreparedPairs
    twice : ndarray, shape (n, nao, nao)
        D + D^T.
    """

    def __init__(self, memory, basis, prepared, twice):
        pairs, members, count = prepared.pairs, prepared.data.members, len(twice)
        self.density, self.j = (memory.zeros((count, pairs.nprim, pairs.nherm)) for _ in range(2))
        shape = count, len(members), pairs.nherm, LANES
        self.lane_density, self.lane_j = (memory.empty(shape, aligned_empty) for _ in range(2))
        self.lane_density[:] = self.lane_j[:] = 0.0
        rows, columns = pair_places(basis, pairs)
        values = twice[:, rows, columns].reshape(count, len(pairs), pairs.nab) * pair_weights(pairs)
        for first, last in pieces(pairs):
            owner, h = dense_h(prepared, first, last)
            for some in few_densities(count, (last - first) * max(pairs.nab, pairs.nherm)):
                self.density[some, first:last] = np.einsum("ska,kap->skp", values[some, owner], h)
        used = members >= 0
        for some in few_densities(count, used.size * pairs.nherm):
            in_lanes = self.lane_density[some].transpose(0, 1, 3, 2)
            in_lanes[:, used] = (self.density[some] * signs(pairs.l))[:, members[used]]


def dense_h(prepared, first, last):
    """(pair of each primitive pair, H without sign) of the primitive pairs first to last."""
    pairs = prepared.pairs
    sequence, rows, columns = structure_of(pairs)
    h = np.zeros((last - first, pairs.nab, pairs.nherm))
    row = np.repeat(sequence[np.arange(len(rows) - 1) % pairs.nab], np.diff(rows))
    h[:, row, columns] = prepared.h(BOTH).flat[first:last]
    return np.searchsorted(pairs.start, np.arange(first, last), side="right") - 1, h


# Largest number of doubles of the dense H that is made at once.
DENSE = 1 << 17
# Of copies of several densities.
COPIED = 1 << 13


def pieces(pairs):
    """(first, last) of the primitive pairs whose dense H is made at once."""
    step = max(1, DENSE // (pairs.nab * pairs.nherm))
    return ((n, min(n + step, pairs.nprim)) for n in range(0, pairs.nprim, step))


def few_densities(count, numbers):
    """Slices of densities, so few that copies of so many numbers of each are small."""
    step = max(1, COPIED // max(1, numbers))
    return [slice(first, first + step) for first in range(0, count, step)]


class HostCoulomb:
    """D and J in the Hermite basis, in host memory; see `md4.backends.Sums.coulomb` and `md4.backends.SumsTarget`."""

    def __init__(self, engine, survivors, twice):
        self.backend, self.basis, self.survivors, self.twice = engine.backend, engine.bra_basis, survivors, twice
        self.y, self.sides, self.quartets, self.lock = np.zeros(twice.shape), {}, 0, Lock()
        self.backend.memory.watch(self, twice.nbytes)  # not `y`, which belongs to the caller in the end

    def begin(self, lists, keeps_all):
        """Makes D_q of whole lists."""
        for prepared in lists:
            self.sides[prepared] = Side(self.backend.memory, self.basis, prepared, self.twice)

    def take(self, pairs, report=None):
        """Adds the potentials of all `ListPair` that survive."""
        every, tolerance = by_work([*map(self.survivors.bounded, pairs)]), self.survivors.rule.tolerance
        work, lists = sum(this.work for this in every), Lists()
        threads = int(max(1, min(number_of_threads(), work // THREAD_WORK)))
        most = min(work / (TASKS * threads), TASK_WORK)
        tasks = [(this, row) for this in every for row in task_rows(this, lists, most)]
        if not tasks:  # parts of lists may be empty
            return
        table = lists.table()
        works = self.backend.workspaces(threads, task_sizes(table, np.array([row for _, row in tasks])))
        tasks.reverse()

        def worker(thread):
            for this, row in taken_from(tasks):
                done = self.contract(this, np.array(row), table, tolerance, works[thread])
                with self.lock:
                    self.quartets += done
                if report is not None:
                    report(done * this.seconds())

        run_threads(len(works), worker, tasks.clear)

    def contract(self, this, row, table, tolerance, work):
        """One task; its sums are added to those of the lists under a lock."""
        bra, ket, count = self.sides[this.bra], self.sides[this.ket], len(self.twice)
        first, last = row[TASK.first], row[TASK.last]
        prims = this.bra.data.primitives_of(this.bra.pairs.start, first, last)
        memory = self.backend.memory
        j_bra, j_ket = memory.zeros((count, len(prims), this.bra.pairs.nherm)), memory.zeros(ket.lane_j.shape)
        sums = aligned_empty((count, this.bra.pairs.nherm, LANES))
        operator = self.backend.operator
        quartets = contract_r(operator.kind)(
            row, table, tolerance, operator.parameter, self.backend.table, bra.density, ket.lane_density, j_bra, j_ket,
            sums, work,
        )  # fmt: skip
        with self.lock:
            for some in few_densities(count, j_bra[0].size):
                bra.j[some, prims] += j_bra[some]
            ket.lane_j += j_ket
        return quartets

    def end(self, lists, fetched=True):
        """Adds the sums of whole lists to Y; (computed, wanted) quartets, which are the same."""
        for prepared in lists:
            self.collect(prepared)
        return self.quartets, self.quartets

    def collect(self, prepared):
        """Adds the sums of a whole list to Y."""
        pairs, side, count = prepared.pairs, self.sides.pop(prepared), len(self.twice)
        used, members = prepared.data.members >= 0, prepared.data.members
        sums = side.j
        for some in few_densities(count, used.size * pairs.nherm):
            sums[some, members[used]] += side.lane_j[some].transpose(0, 1, 3, 2)[:, used] * signs(pairs.l)
        del side  # D and what is in lanes give their memory to what follows
        values = np.zeros((count, len(pairs), pairs.nab))
        for first, last in pieces(pairs):
            owner, h = dense_h(prepared, first, last)
            for some in few_densities(count, (last - first) * pairs.nab):
                these = np.einsum("skp,kap->ska", sums[some, first:last], h)
                for of_pairs, added in zip(values[some], these):
                    np.add.at(of_pairs, owner, added)
        rows, columns = pair_places(self.basis, pairs)
        for some in few_densities(count, values[0].size):
            self.y[some, rows, columns] += (values[some] * pair_weights(pairs)).reshape(
                -1, len(pairs), pairs.na, pairs.nb
            )

    def result(self):
        """Y, shape (n, nao, nao)."""
        return self.y
