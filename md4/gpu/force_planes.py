"""Gradients of molecules in a plane: which functions meet (`md4.method.mirror`).

Let ab, cd, p and q be even or odd functions. As r[p + q] is zero for p and q of unlike parity, and H for unlike cd and
q, U[cd, p] needs cd and p of one parity only, which are a quarter of both products or less:

    U[cd, p] = sum_q H[cd, q] [q|p]      Z[ab, p] = sum_cd Gamma[ab, cd] U[cd, p]      cd, p, q all even, or all odd

Functions ab of the other parity give the forces at right angles to the plane. Their Gamma has in each term one element
of D between an even and an odd AO. If D has none but for rounding, they are left out, too, and what that may change is
among the bounds of what is left out.
"""

from typing import NamedTuple

import numpy as np

from md4.method.mirror import ao_parities, between_parities, mixes_parities
from md4.shells.schwarz import block_norms

# Highest mean bound of what is left out of a shell quartet for the sake of the plane, in units of the tolerance.
MIXED_PART = 1e-3


class Plane(NamedTuple):
    """The mirror axis, and whether densities have elements between even and odd AOs that count."""

    axis: int
    mixed: bool


def mixed_bound(basis, pairs, bounds, mixed, norms, coulomb, exchange):
    """Bound of what Gamma of functions ab and cd of unlike parity adds to a force, the sum over all quartets.

    Parameters
    ----------
    basis : md4.Basis
    pairs : list of ndarray, shape (npair, 2)
        Shells of the pairs of each list.
    bounds : list of md4.shells.schwarz.GradientBounds
    mixed, norms : ndarray, shape (n, nshell, nshell)
        `block_norms` of `md4.method.mirror.between_parities`, and of the densities.
    coulomb, exchange : ndarray, shape (n,)
        Factors of the densities (`md4.gpu.kernels.reverse_sums`).
    """
    own, derivative = np.zeros((2, basis.nshell, basis.nshell))
    for (a, b), these in zip((shells.T for shells in pairs), bounds):
        for matrix, values in (own, these.own), (derivative, these.derivative):
            # f = 2 stands for both orders of two shells
            matrix[a, b] = matrix[b, a] = values / np.where(a == b, 1.0, 2.0)
    total = 0.0
    for m, n, j, k in zip(mixed, norms, abs(coulomb), abs(exchange)):
        total += j * ((derivative * m).sum() * (own * n).sum() + (derivative * n).sum() * (own * m).sum())
        total += k * ((m.T @ derivative @ n * own).sum() + (n.T @ derivative @ m * own).sum())
    return float(total)


def plane_of(basis, pairs, bounds, densities, norms, coulomb, exchange, tolerance):
    """(`Plane` or None, bounds of what is left out for its sake and of their squares), arguments as of `mixed_bound`.
    """
    axis, none = basis.mirror_axis, np.zeros(2)
    if axis is None:
        return None, none
    # without the bounds, which a backend that launches nothing has not
    odd = ao_parities(basis.classes, basis.pure, axis)
    if mixes_parities(odd, densities):
        return Plane(axis, True), none
    mixed = block_norms(basis, between_parities(odd, densities))
    bound = mixed_bound(basis, pairs, bounds, mixed, norms, coulomb, exchange) if mixed.any() else 0.0
    quartets = sum(map(len, pairs)) ** 2
    if not bound <= MIXED_PART * tolerance * quartets:
        return Plane(axis, True), none
    return Plane(axis, False), np.array([bound, bound**2 / quartets])
