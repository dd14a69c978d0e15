"""Second-order energies and amplitudes, and the integrals (ia|jb) that they are made of, of one or two spins.

    t_ij^ab = (ia|jb) / (e_i + e_j - e_a - e_b)
    opposite spins:  sum_ijab t_ij^ab (ia|jb)          same spin:  1/2 sum_ijab t_ij^ab ((ia|jb) - (ib|ja))

Pairs with i >= j of the same orbitals are made once. Energies are summed where the integrals are.
"""

from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from typing import Any

import numpy as np

from md4.contract.transform import OneIndexOfEachSide, most_orbitals
from md4.support.memory import host_array


@dataclass
class Spin:
    """Orbitals of one spin, or of both where they are the same.

    Attributes
    ----------
    occupied, virtual : ndarray, shapes (nao, o) and (nao, v)
        Coefficients.
    energies : ndarray, shape (o + v,)
        In Hartree; None where only integrals are wanted.
    """

    occupied: Any
    virtual: Any
    energies: Any = None

    @property
    def shape(self):
        return self.occupied.shape[1], self.virtual.shape[1]


class OccupiedVirtual:
    """(ia|jb) of the spins; errors are those of `OneIndexOfEachSide`.

    They come from one pass through all integrals if there is memory for X of all occupied orbitals. Else these are
    divided into groups, and each two groups have a pass.

    Parameters
    ----------
    team : md4.contract.row_team.RowTeam
    spins : list of Spin
        One, or that of alpha and that of beta.
    """

    def __init__(self, team, spins):
        self.team, self.spins = team, spins

    def each_block(self, use):
        """Calls use(s, t, pairs, (ia|jb)) of the spins s <= t of i and j.

        The integrals are on the device, of shape (a, pair, b). If s = t, there are the pairs i >= j only.
        """
        count, virtual = sum(spin.shape[0] for spin in self.spins), max(spin.shape[1] for spin in self.spins)
        most = most_orbitals(self.team, count, virtual)
        groups = -(-count // (most // 2)) if 1 < most < count else 1  # three or more, or one
        parts, left = np.array_split(np.arange(count), groups), np.ones((count, count), dtype=bool)
        for two in combinations(parts, 2) if groups > 1 else [parts]:
            chosen = np.concatenate(two)
            self._pass(chosen, left, use)
            left[np.ix_(chosen, chosen)] = False

    def _pass(self, chosen, left, use):
        """`each_block` of the chosen ones of all occupied orbitals, and of the pairs of these that are left."""
        occupied, virtual = np.hstack([spin.occupied for spin in self.spins]), max(s.shape[1] for s in self.spins)
        one = OneIndexOfEachSide(self.team, occupied[:, chosen], virtual)
        sets, begins = [one.sorted(spin.virtual) for spin in self.spins], [0, self.spins[0].shape[0]]
        of_spin = [np.flatnonzero((chosen >= b) & (chosen < b + spin.shape[0])) for b, spin in zip(begins, self.spins)]
        for s, t in combinations_with_replacement(range(len(self.spins)), 2):
            i, j = (x.ravel() for x in np.meshgrid(of_spin[s], of_spin[t], indexing="ij"))
            wanted = left[chosen[i], chosen[j]] & ((i >= j) | (s != t))
            for some, found in one.blocks(np.stack([i, j], axis=1)[wanted], sets[s], sets[t]):
                use(s, t, chosen[some] - np.take(begins, [s, t]), found)

    def integrals(self, put):
        """Calls put(s, t, i, j, (ia|jb)) with matrices (a, b) on the host, for all i, j of the spins s <= t."""

        def use(s, t, pairs, found):
            blocks = self.team.algebra.fetch(found).transpose(1, 0, 2)
            for block, (i, j) in zip(blocks, pairs.tolist()):
                put(s, t, i, j, block)
                if s == t and i != j:
                    put(s, t, j, i, block.T)

        with self.team.engine.lock, self.team.algebra.working():
            self.each_block(use)

    def energies(self, with_t2=False):
        """As `Sums.result`; MemoryLimitError where the amplitudes do not fit, before the first integral is made."""
        t2, algebra = amplitudes(self.spins) if with_t2 else {}, self.team.algebra

        def use(s, t, pairs, found):
            levels = [self.spins[n].energies[pairs[:, k]] for k, n in enumerate((s, t))]
            work = [algebra.empty(found.shape) for _ in range(2)]
            sums.add(s, t, pairs, sums.send(sum(levels)), found, work)

        with self.team.engine.lock, algebra.working():
            sums = Sums(algebra, self.spins, t2)
            self.each_block(use)
            return sums.result()


def amplitudes(spins):
    """Arrays on the host for t_ij^ab of the spins (s, t), s <= t: (o_s, o_t, v_s, v_t)."""
    shapes = {(s, t): [*zip(spins[s].shape, spins[t].shape)] for t in range(len(spins)) for s in range(t + 1)}
    what = "amplitudes of MP2, which with_t2=False leaves out,"
    return {key: host_array((*occupied, *virtual), what) for key, (occupied, virtual) in shapes.items()}


class Sums:
    """Energies of pairs of orbitals, and their amplitudes.

    Parameters
    ----------
    algebra : md4.backends.Algebra
        The caller works with it, here and for all methods.
    spins : list of Spin
    t2 : dict of ndarray
        From `amplitudes`, which are written; empty where they are not wanted.
    """

    def __init__(self, algebra, spins, t2):
        self.algebra, self.t2 = algebra, t2
        self.virtual = [self.send(spin.energies[spin.shape[0] :]) for spin in spins]
        self.direct, self.exchange = (algebra.xp.zeros((len(spins), len(spins))) for _ in range(2))

    def send(self, energies):
        """Energies of orbitals on the device."""
        return self.algebra.send(np.ascontiguousarray(energies, dtype=float))

    def add(self, s, t, pairs, occupied, found, work):
        """The part of some pairs of the spins s <= t; if s = t, i and j != i stand for j and i, too.

        Parameters
        ----------
        pairs : ndarray of int, shape (n, 2)
            i, j
        occupied : array, shape (n,)
            e_i + e_j, on the device.
        found : array, shape (a, n, b)
            (ia|jb), on the device, C-contiguous.
        work : (array, array)
            Memory of the shape of `found`.
        """
        xp, (made, turned) = self.algebra.xp, work
        xp.add(occupied[:, None] - self.virtual[t], -self.virtual[s][:, None, None], out=made)
        xp.divide(found, made, out=made)
        if self.t2:
            self.keep(s, t, pairs, made)
        if s == t:
            for n in np.flatnonzero(pairs[:, 0] == pairs[:, 1]).tolist():
                made[:, n] *= 0.5
            turned[...] = found.transpose(2, 1, 0)
            self.exchange[s, t] += 2.0 * xp.vdot(made.reshape(-1), turned.reshape(-1))
        self.direct[s, t] += (1.0 + (s == t)) * xp.vdot(made.reshape(-1), found.reshape(-1))

    def keep(self, s, t, pairs, made):
        """Copies amplitudes to all their places on the host."""
        kept, (i, j), found = self.t2[s, t], pairs.T, self.algebra.fetch(made)
        kept[i, j] = found.transpose(1, 0, 2)
        if s == t:
            kept[j, i] = found.transpose(1, 2, 0)

    def result(self):
        """(energy of the same spin, energy of opposite spins, amplitudes by spins); energies are in Hartree."""
        direct, exchange = (self.algebra.fetch(array) for array in (self.direct, self.exchange))
        return float((direct - exchange).trace()) / len(direct), float(direct[0, -1]), self.t2
