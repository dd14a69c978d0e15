"""Gradients of energies that are sums of products of density matrices with integrals.

Everything becomes a sum of squares, E = 1/2 sum_s [ j_s D_ab D_cd - k_s D_ac D_bd ] (ab|cd), whose D are symmetric, or
antisymmetric with j_s = 0. For any matrices L and R, with symmetric parts S and antisymmetric parts A,

    L_ab R_cd (ab|cd) = S^L_ab S^R_cd (ab|cd)          L_ac R_bd (ab|cd) = (S^L_ac S^R_bd + A^L_ac A^R_bd) (ab|cd)

summed over all functions, by the permutations of (ab|cd), and X Y = ((X + Y)/2)^2 - ((X - Y)/2)^2 for two matrices.
"""

from typing import NamedTuple

import numpy as np

from md4.contract.densities import checked_densities
from md4.errors import ArgumentError
from md4.support.arguments import checked_real

# Relative to the largest element of a density: a larger difference to its transpose is no rounding error.
ASYMMETRY = 1e-8
# A gradient leaves out quartets by a tolerance so much larger than that of J and K, as its bounds go with D^2.
FACTOR = 10.0


class Terms(NamedTuple):
    """Densities, shape (n, nao, nao), and the factors j and k of each, shape (n,)."""

    densities: np.ndarray
    coulomb: np.ndarray
    exchange: np.ndarray


def energy_terms(dm, coulomb, exchange, nao):
    """The `Terms` of the energy of one density, or of those of both spins.

    Raises
    ------
    ArgumentError
        Densities of other shapes, that are not symmetric or not real, or factors that are no finite numbers.
    """
    densities, shape = checked_densities(dm, 1, nao)
    coulomb, exchange = checked_real("coulomb", coulomb), checked_real("exchange", exchange)
    if len(shape) == 3 and shape[0] != 2:
        raise ArgumentError(
            f"the gradient takes one density matrix, shape ({nao}, {nao}), or those of alpha and beta, shape "
            f"(2, {nao}, {nao}), not {shape[0]}; see product_gradient for others."
        )
    check_real(densities)
    largest = abs(densities).max()
    if abs(densities - densities.transpose(0, 2, 1)).max() > ASYMMETRY * largest:
        raise ArgumentError("the gradient takes symmetric density matrices; see product_gradient for others.")
    if len(shape) == 2:
        return in_use(densities, [coulomb], [exchange / 2])
    both = np.concatenate([densities.sum(axis=0)[None], densities])
    return in_use(both, [coulomb, 0.0, 0.0], [0.0, exchange, exchange])


def product_terms(left, right, coulomb, exchange, nao):
    """The `Terms` of 1/2 sum_n [ j_n L_ab R_cd - k_n L_ac R_bd ] (ab|cd); errors as in `energy_terms`."""
    left, shape = checked_densities(left, 0, nao)
    right, other = (left, shape) if right is None else checked_densities(right, 0, nao)
    if shape != other:
        raise ArgumentError(f"left and right must have the same shape, not {shape} and {other}.")
    check_real(left)
    check_real(right)
    factors = [checked_factors(name, given, len(left)) for name, given in (("coulomb", coulomb), ("exchange", exchange))]
    densities, of_j, of_k = [], [], []
    for one, two, j, k in zip(left, right, *factors):
        for sign in (1, -1):
            x, y = ((this + sign * this.T) / 2 for this in (one, two))
            densities += [(x + y) / 2, (x - y) / 2]
            of_j += [j, -j] if sign == 1 else [0.0, 0.0]
            of_k += [k, -k]
    return in_use(np.array(densities), of_j, of_k)


def checked_factors(name, given, count):
    """`count` finite numbers, from as many or from one."""
    values = np.atleast_1d(np.asarray(given, dtype=object))
    if values.shape not in ((1,), (count,)):
        raise ArgumentError(f"{name} must be a number or {count} numbers, one for each product.")
    return np.broadcast_to(np.array([checked_real(name, value) for value in values]), count)


def check_real(densities):
    """ArgumentError for complex densities."""
    if np.iscomplexobj(densities):
        raise ArgumentError("gradients take real density matrices; those of complex ones are not available.")


def in_use(densities, coulomb, exchange):
    """`Terms` without those that are zero."""
    coulomb, exchange = np.array(coulomb, dtype=float), np.array(exchange, dtype=float)
    used = ((coulomb != 0) | (exchange != 0)) & densities.any(axis=(1, 2))
    return Terms(np.ascontiguousarray(densities[used]), coulomb[used], exchange[used])
