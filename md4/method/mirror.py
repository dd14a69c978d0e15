"""Molecules in a plane: functions that are even and odd under reflection in it.

If all centres have the same coordinate on an axis, z say, the molecule is its own mirror image in that plane. An AO is
even or odd under the reflection, by the power of z of its monomials, and so is a pair of AOs. An integral over the
Coulomb operator, or any other that depends on the distance only, is zero unless ab and cd are both even or both odd.
In the matrix form (`md4.engine`) this is seen at every step: H[ab, p] is zero unless ab and p_z are both even or both
odd, since E_t^{ij} of the z axis is zero for odd i + j - t where P_z = A_z = B_z; and [p|q] = r[p+q] is zero for odd
p_z + q_z, since R_z is zero. So each of the two products falls into two products of matrices of half the size.

An axis is 0, 1 or 2 for z, y and x, as in the triples of Hermite functions. A parity is 0 for even, 1 for odd.
"""

from functools import cache

import numpy as np

from md4.method.angular import hermite_triples, nherm
from md4.method.derivatives import derived_elements
from md4.method.hermite import component_table, in_rows, nonzero_elements

# Largest element of a density between an even and an odd AO that is taken for rounding, in units of the largest of all.
ROUNDING = 2.0**-46


def mirror_axis(centres):
    """The first of the axes z, y and x on which all centres have exactly the same coordinate, or None.

    Parameters
    ----------
    centres : ndarray, shape (n, 3)
        (x, y, z) of each.
    """
    same = (centres == centres[:1]).all(axis=0)[::-1]
    return int(same.argmax()) if same.any() else None


@cache
def component_parities(l, pure, axis):
    """Parity of each angular component of a shell; shape (ncomp,)."""
    start, powers, _ = component_table(l, pure)
    return (powers[start[:-1]] >> (8 * axis)) & 1


@cache
def function_parities(l, pure, nctr, axis):
    """Parity of each function of a shell, in the order [contraction][component]; shape (nctr ncomp,)."""
    return np.tile(component_parities(l, pure, axis), nctr)


def ao_parities(classes, pure, axis):
    """Whether each AO is odd, of shells with such (l, nctr); shape (nao,)."""
    return np.concatenate([function_parities(l, pure, nctr, axis) for l, nctr in classes.tolist()]) == 1


def between_parities(odd, densities):
    """The densities without elements between two even or two odd AOs, shape (n, nao, nao); `odd` as `ao_parities`."""
    return np.where(odd[:, None] == odd, 0.0, densities)


def mixes_parities(odd, densities):
    """Whether densities have elements between even and odd AOs, but for rounding."""
    return not abs(between_parities(odd, densities)).max(initial=0.0) <= ROUNDING * abs(densities).max(initial=0.0)


@cache
def function_counts(l, pure, nctr, axis):
    """Numbers of even and of odd functions of a shell."""
    odd = int(function_parities(l, pure, nctr, axis).sum())
    return nctr * len(component_parities(l, pure, axis)) - odd, odd


@cache
def part_rows(la, lb, pure, nctr_a, nctr_b, axis, parity):
    """The rows (a, b) of H of one parity, a nb + b each; shape (nrow,).

    First those of even a with the b that go with them, then those of odd a: two rectangles of a and b, each in C order.
    """
    a, b = function_parities(la, pure, nctr_a, axis), function_parities(lb, pure, nctr_b, axis)
    rectangles = [np.flatnonzero(a == of_a)[:, None] * len(b) + np.flatnonzero(b == of_a ^ parity) for of_a in range(2)]
    return np.concatenate([rows.reshape(-1) for rows in rectangles])


@cache
def part_functions(l, axis, parity):
    """Ordinals of the Hermite functions up to degree l of one parity, rising; shape (n,)."""
    return np.flatnonzero(hermite_triples(l)[:, axis] % 2 == parity)


def r_count(l, even=False):
    """Numbers r[t] up to L = `l` that are kept of a quartet: all, or those of even t on an axis."""
    return len(part_functions(l, 0, 0)) if even else nherm(l)


@cache
def part_elements(la, lb, pure, nctr_a, nctr_b, axis, parity):
    """`md4.method.hermite.nonzero_elements` of the rows and Hermite functions of one parity.

    Rows are numbered as in `part_rows`, Hermite functions by their ordinals among all.
    """
    rows = part_rows(la, lb, pure, nctr_a, nctr_b, axis, parity)
    row, p = nonzero_elements(la, lb, pure, nctr_a, nctr_b).T
    place = np.full(row[-1] + 1, -1)
    place[rows] = np.arange(len(rows))
    inside = (place[row] >= 0) & np.isin(p, part_functions(la + lb, axis, parity))
    return in_rows(place[row[inside]], p[inside])


def class_elements(facts):
    """The elements (ab, p) of H that can be nonzero, by the `ListFacts` of all of a class, of a part or of derivatives.
    """
    if facts.derivatives:
        return derived_elements(*facts.shell_class, facts.single, facts.derivatives)
    if facts.mirror:
        return part_elements(*facts.shell_class, *facts.mirror)
    return nonzero_elements(*facts.shell_class, facts.single)
