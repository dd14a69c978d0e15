"""Energies of second-order perturbation theory (MP2) with fitted integrals (RI-MP2).

    (ia|jb) = sum_Q B[Q, ia] B[Q, jb]

All B[Q, ia] are on the device (`md4.contract.fitting_orbitals`). A product makes the integrals of one i with as many j
as there is memory for; of two orbitals of one spin only those with j <= i. `md4.contract.mp2` sums them up at once.
"""

import numpy as np

from md4.contract.fitting_orbitals import Pieces, share_of
from md4.contract.mp2 import Sums, amplitudes

# Arrays of the size of the integrals with which a block works: integrals, t, integrals with a and b exchanged.
ARRAYS = 3


def mp2(fit, spins, with_t2=False):
    """Energies and amplitudes, as from `md4.contract.mp2.Sums`.

    Parameters
    ----------
    fit : DensityFitting or FittingTeam
    spins : list of md4.contract.mp2.Spin
        One for closed shells, else alpha and beta.
    with_t2 : bool
        Whether t is returned, which otherwise is never there as a whole.

    Raises
    ------
    MemoryLimitError
        There is no memory for the least part of the work, or none on the host for t.
    """
    t2, pairs = amplitudes(spins) if with_t2 else {}, [(spin.occupied, spin.virtual) for spin in spins]
    memory = memory_of_products(fit, spins)
    with fit.working():
        sums = Sums(fit.algebra, spins, t2)
        occupied = [sums.send(spin.energies[: spin.shape[0]]) for spin in spins]

    def add(one, mine, other, theirs):
        (s, t), algebra = (one.number, other.number), fit.algebra
        v, w = spins[s].shape[1], spins[t].shape[1]
        most = max(1, memory // (ARRAYS * 8 * v * w))
        with fit.working():
            room = [algebra.empty((v * w * min(most, other.last - other.first),)) for _ in range(ARRAYS)]
            for i in range(one.first, one.last):
                left = mine[(i - one.first) * v : (i - one.first + 1) * v]
                end = min(i + 1, other.last) if s == t else other.last
                for j in range(other.first, end, most):
                    last = min(j + most, end)
                    right = theirs[(j - other.first) * w : (last - other.first) * w]
                    found, *work = (array[: v * w * (last - j)].reshape(v, last - j, w) for array in room)
                    algebra.product(left, right.T, found.reshape(v, -1))
                    numbers = np.stack([np.full(last - j, i), np.arange(j, last)], axis=1)
                    sums.add(s, t, numbers, occupied[s][i] + occupied[t][j:last], found, work)

    wanted = {(s, t) for t in range(len(spins)) for s in range(t + 1)}
    Pieces(fit, pairs, beside=memory).products(wanted, add)
    with fit.working():
        return sums.result()


def memory_of_products(fit, spins):
    """Bytes of the products of an i with some j; MemoryLimitError if there is no room for one j."""
    o, v = (max(spin.shape[n] for spin in spins) for n in range(2))
    least = ARRAYS * 8 * v * v
    with fit.working():
        fit.algebra.check_fits(least, f"MP2 of two occupied and {v} virtual orbitals needs")
    return max(least, share_of(fit, o * least))
