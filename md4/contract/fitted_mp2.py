"""Energies of second-order perturbation theory (MP2) with fitted integrals (RI-MP2).

    t[i, a, j, b] = (ia|jb) / (e_i + e_j - e_a - e_b) ,     (ia|jb) = sum_Q B[Q, ia] B[Q, jb]

    direct = sum_iajb t[i, a, j, b] (ia|jb) ,       exchange = sum_iajb t[i, a, j, b] (ib|ja)

All B[Q, ia] are on the device (`md4.contract.fitting_orbitals`). A product makes the integrals of one i with as many j
as there is memory for; of two orbitals of one spin only those with j <= i. The integrals are used at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from md4.contract.fitting_orbitals import Pieces, host_array, share_of
from md4.errors import MemoryLimitError
from md4.support.display import size_text

# Arrays of the size of the integrals with which `Sums` works: integrals, t, integrals with a and b exchanged.
ARRAYS = 3


@dataclass
class Spin:
    """The active orbitals of a spin.

    Attributes
    ----------
    occupied, virtual : ndarray, shapes (nao, o) and (nao, v)
    occupied_energies, virtual_energies : ndarray, shapes (o,) and (v,)
        In Hartree.
    """

    occupied: Any
    virtual: Any
    occupied_energies: Any
    virtual_energies: Any

    @property
    def sizes(self):
        return self.occupied.shape[1], self.virtual.shape[1]


def mp2(fit, spins, with_t2=False):
    """Sums over the pairs of orbitals of each two spins.

    Parameters
    ----------
    fit : DensityFitting or FittingTeam
    spins : list of Spin
        One for closed shells, else alpha and beta.
    with_t2 : bool
        Whether t is returned, which otherwise is never there as a whole.

    Returns
    -------
    direct, exchange : ndarray, shape (n, n), in Hartree
        For spins s >= s'; the exchange of different spins is 0, and so are sums with s < s'.
    t2 : dict of ndarray, shapes (o, o', v, v')
        t[i, a, j, b] as [i, j, a, b] of spins (s, s') with s <= s'; empty without `with_t2`.

    Raises
    ------
    MemoryLimitError
        There is no memory for the least part of the work, or none on the host for t.
    """
    sums = Sums(fit, spins, with_t2)
    pairs = [(spin.occupied, spin.virtual) for spin in spins]
    wanted = {(s, r) for s in range(len(spins)) for r in range(s + 1)}
    Pieces(fit, pairs, beside=sums.memory).products(wanted, sums.add)
    with fit.working():
        direct, exchange = (fit.algebra.fetch(array) for array in sums.energies)
    return direct, exchange, sums.t2


class Sums:
    """What `mp2` adds up.

    Attributes
    ----------
    memory : int
        Bytes of the products with which it works.
    energies : list of array
        Direct sums and exchange on the device.
    """

    def __init__(self, fit, spins, with_t2):
        self.fit, self.spins, self.t2 = fit, spins, {}
        o, v = (max(spin.sizes[n] for spin in spins) for n in range(2))
        self.memory, least = share_of(fit, ARRAYS * 8 * o * v * v), ARRAYS * 8 * v * v
        if self.memory < least:
            with fit.working():
                self.memory, left = least, fit.algebra.memory_left()
            if least > left:
                raise MemoryLimitError(
                    f"MP2 with {v} virtual orbitals needs {size_text(least)} for integrals of two occupied ones, but "
                    f"{size_text(left)} may be used; raise max_memory."
                )
        for s in range(len(spins) if with_t2 else 0):
            for r in range(s + 1):
                (o, v), (p, w) = spins[r].sizes, spins[s].sizes
                self.t2[r, s] = host_array((o, p, v, w), "amplitudes of MP2, which with_t2=False leaves out,")
        with fit.working():
            self.levels = [
                [fit.algebra.send(np.ascontiguousarray(e)) for e in (spin.occupied_energies, spin.virtual_energies)]
                for spin in spins
            ]
            self.energies = [fit.algebra.xp.zeros((len(spins), len(spins))) for _ in range(2)]

    def add(self, one, mine, other, theirs):
        """The part of two `Piece`s."""
        v, w = (self.spins[piece.number].sizes[1] for piece in (one, other))
        most, same = max(1, self.memory // (ARRAYS * 8 * v * w)), one.number == other.number
        with self.fit.working():
            memory = [self.fit.algebra.empty((v * w * min(most, other.last - other.first),)) for _ in range(ARRAYS)]
            for i in range(one.first, one.last):
                left = mine[(i - one.first) * v : (i - one.first + 1) * v]
                end = min(i + 1, other.last) if same else other.last
                for j in range(other.first, end, most):
                    last = min(j + most, end)
                    right = theirs[(j - other.first) * w : (last - other.first) * w]
                    room = [array[: v * w * (last - j)].reshape(v, last - j, w) for array in memory]
                    self.add_block((one.number, i, left), (other.number, j, last, right), room)

    def add_block(self, of_i, of_j, room):
        """The part of one i and j from first to last - 1."""
        (s, i, left), (r, first, last, right), (made, t, turned) = of_i, of_j, room
        algebra, xp, (direct, exchange) = self.fit.algebra, self.fit.algebra.xp, self.energies
        algebra.product(left, right.T, made.reshape(len(left), -1))
        (e_i, e_a), (e_j, e_b) = self.levels[s], self.levels[r]
        xp.add((e_i[i] - e_a)[:, None, None], e_j[first:last, None] - e_b, out=t)
        xp.divide(made, t, out=t)
        if self.t2:
            self.keep(s, i, r, first, last, t)
        factor = 1.0
        if s == r:
            factor = 2.0
            if last == i + 1:
                t[:, -1] *= 0.5  # i with itself counts once
            turned[...] = made.transpose(2, 1, 0)
            exchange[s, r] += 2.0 * xp.vdot(t.reshape(-1), turned.reshape(-1))
        direct[s, r] += factor * xp.vdot(t.reshape(-1), made.reshape(-1))

    def keep(self, s, i, r, first, last, t):
        """Copies amplitudes to the host."""
        found, kept = self.fit.algebra.fetch(t), self.t2[r, s]
        kept[first:last, i] = found.transpose(1, 2, 0)
        if s == r:
            kept[i, first:last] = found.transpose(1, 0, 2)
