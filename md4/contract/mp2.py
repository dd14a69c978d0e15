"""Second-order energies and amplitudes, and the integrals (ia|jb) that they are made of, of one or two spins.

    t_ij^ab = (ia|jb) / (e_i + e_j - e_a - e_b)
    opposite spins:  sum_ijab t_ij^ab (ia|jb)          same spin:  1/2 sum_ijab t_ij^ab ((ia|jb) - (ib|ja))

Pairs with i >= j of the same orbitals are made once. Energies are summed where the integrals are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from md4.contract.transform import OneIndexOfEachSide
from md4.errors import MemoryLimitError
from md4.support.display import size_text


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
    """(ia|jb) of the spins, from one pass through all integrals; errors are those of `OneIndexOfEachSide`.

    Parameters
    ----------
    engine : md4.engine.Engine
    spins : list of Spin
        One, or that of alpha and that of beta.
    progress : bool, optional
        As in `md4.int2e`.
    """

    def __init__(self, engine, spins, progress=None):
        self.spins, occupied = spins, np.hstack([spin.occupied for spin in spins])
        self.one = OneIndexOfEachSide(engine, occupied, max(spin.shape[1] for spin in spins), progress)
        self.algebra = self.one.algebra

    def blocks(self):
        """Yields (s, t, pairs, (ia|jb)) of the spins s <= t of i and j.

        The integrals are on the device, of shape (a, pair, b). If s = t, there are the pairs i >= j only.
        """
        virtual = [self.one.sorted(spin.virtual) for spin in self.spins]
        for s, (here, _) in enumerate(spin.shape for spin in self.spins):
            for t, (there, _) in enumerate(spin.shape for spin in self.spins):
                if s > t:
                    continue
                numbers = np.tril_indices(here) if s == t else np.indices((here, there)).reshape(2, -1)
                begin = np.array([0, self.spins[0].shape[0]])[[s, t]]  # where the orbitals of a spin begin
                for some, found in self.one.blocks(np.stack(numbers, axis=1) + begin, virtual[s], virtual[t]):
                    yield s, t, some - begin, found

    def integrals(self, put):
        """Calls put(s, t, i, j, (ia|jb)) with matrices (a, b) on the host, for all i, j of the spins s <= t."""
        with self.one.engine.lock, self.algebra.working():
            for s, t, pairs, found in self.blocks():
                blocks = self.algebra.fetch(found).transpose(1, 0, 2)
                for block, (i, j) in zip(blocks, pairs.tolist()):
                    put(s, t, i, j, block)
                    if s == t and i != j:
                        put(s, t, j, i, block.T)

    def energies(self, with_t2=False):
        """(energy of the same spin, of opposite spins, amplitudes).

        Returns
        -------
        same, opposite : float
            In Hartree.
        amplitudes : dict of ndarray
            For the spins (s, t), s <= t: t_ij^ab of shape (o_s, o_t, v_s, v_t). Empty without `with_t2`.

        Raises
        ------
        MemoryLimitError
            The amplitudes do not fit into host memory; found before they are made.
        """
        amplitudes = self._rooms() if with_t2 else {}
        same = opposite = 0.0
        with self.one.engine.lock, self.algebra.working():
            gaps = [self._gaps(spin) for spin in self.spins]
            for s, t, pairs, found in self.blocks():
                direct, exchange, made = self._pair_energies(found, pairs, gaps[s], gaps[t], s == t, with_t2)
                weight = 2.0 - (pairs[:, 0] == pairs[:, 1]) if s == t else np.ones(len(pairs))
                if s != t or len(self.spins) == 1:
                    opposite += float(weight @ direct)
                if s == t:
                    same += float(weight @ (direct - exchange)) / len(self.spins)
                if with_t2:
                    fill(amplitudes[s, t], pairs, made, s == t)
        return same, opposite, amplitudes

    def _rooms(self):
        """Arrays for amplitudes."""
        spins = [(s, t) for t in range(len(self.spins)) for s in range(t + 1)]
        shapes = {(s, t): tuple(np.stack([self.spins[s].shape, self.spins[t].shape]).T.ravel()) for s, t in spins}
        need, left = 8 * sum(np.prod(shape, dtype=object) for shape in shapes.values()), self.algebra.host_left()
        if need > left:
            raise MemoryLimitError(
                f"the amplitudes take {size_text(need)} of host memory, but {size_text(left)} may be used; use "
                "with_t2=False for the energy alone."
            )
        return {spins: np.empty(shape) for spins, shape in shapes.items()}

    def _gaps(self, spin):
        """e_i on the host, and e_a on the device."""
        occupied = spin.shape[0]
        return spin.energies[:occupied], self.algebra.send(np.ascontiguousarray(spin.energies[occupied:], dtype=float))

    def _pair_energies(self, found, pairs, of_i, of_j, same, with_t2):
        """Sums over a and b of t (ia|jb) and of t (ib|ja) of each pair, and t on the host if it is wanted."""
        (e_i, e_a), (e_j, e_b) = of_i, of_j
        sums = self.algebra.send(np.ascontiguousarray(e_i[pairs[:, 0]] + e_j[pairs[:, 1]], dtype=float))
        t = sums[None, :, None] - e_a[:, None, None]
        t = found / (t - e_b)
        direct = self.algebra.fetch((t * found).sum(axis=2).sum(axis=0))
        exchange = self.algebra.fetch((t * found.transpose(2, 1, 0)).sum(axis=2).sum(axis=0)) if same else None
        return direct, exchange, self.algebra.fetch(t) if with_t2 else None


def fill(amplitudes, pairs, made, same):
    """Writes t of some pairs, shape (a, pair, b), to all their places."""
    for n, (i, j) in enumerate(pairs.tolist()):
        amplitudes[i, j] = made[:, n]
        if same and i != j:
            amplitudes[j, i] = made[:, n].T
