"""H matrices: Hermite -> AO transformation of shell pairs.

    H[ab, p] = c_a c_b exp(-za zb/p |AB|^2) sum_{xyz of a, b} C_a C_b  E_x E_y E_z

with the McMurchie-Davidson coefficients E_t^{ij} of one Cartesian axis,

    E_t^{i+1,j} = E_{t-1}^{ij}/(2p) + (P-A) E_t^{ij} + (t+1) E_{t+1}^{ij},      E_0^{00} = 1,

and likewise for j with P-B (equations 4 and 5 of the paper). C are the Cartesian -> solid-harmonic coefficients and c
the contraction coefficients. Rows ab are ordered as (contracted a, component a, contracted b, component b). Device
functions are plain Python: the CPU backend, the GPU kernel and the tests all run these functions.
"""

from functools import cache
from itertools import pairwise

import numpy as np

from md4.method.angular import component_coefficients, hermite_triples, packed_powers

# A sum is taken as zero if it is smaller than this times the sum of the moduli of its terms.
NOISE = 1e-15


@cache
def component_table(l, pure):
    """The Cartesian monomials of which each angular component of a shell consists.

    Returns
    -------
    start : ndarray of int32, shape (ncomp + 1,)
        Where each component begins in the next two arrays.
    powers : ndarray of int32, shape (nterm,)
        As `md4.method.angular.packed_powers`.
    weights : ndarray, shape (nterm,)
    """
    c = component_coefficients(l, pure)
    terms = [np.flatnonzero(column) for column in c.T]
    start = np.concatenate([[0], np.cumsum([len(t) for t in terms])]).astype(np.int32)
    powers = np.concatenate([packed_powers(l)[t] for t in terms])
    weights = np.concatenate([c[t, k] for k, t in enumerate(terms)])
    return start, powers, weights


def axis_size(la, lb):
    """Number of doubles of the E coefficients of one axis, whose layout is [i][j][t]."""
    return (la + 1) * (lb + 1) * (la + lb + 1)


def e_coefficient(i, j, t, lb, nt, half, xpa, xpb, e, base):
    """E_t^{ij} of one axis from those of smaller i or j (device function).

    The coefficients are stored at e[base + (i (lb+1) + j) nt + t].
    """
    if i == 0 and j == 0:
        return 1.0 if t == 0 else 0.0
    if j > 0:
        previous, x = base + (i * (lb + 1) + j - 1) * nt, xpb
    else:
        previous, x = base + (i - 1) * (lb + 1) * nt, xpa
    value = x * e[previous + t]
    if t > 0:
        value += half * e[previous + t - 1]
    if t + 1 < nt:
        value += (t + 1) * e[previous + t + 1]
    return value


def h_element(a0, a1, powers_a, weights_a, b0, b1, powers_b, weights_b, pz, py, px, lb, nt, size, e):
    """Angular part of H for one p = (pz, py, px): the sum over monomials a0..a1 of a and b0..b1 of b (device function).

    A sum that cancels to rounding noise is set to zero. Solid harmonics on one centre have no low Hermite degrees, and
    noise there would be multiplied by multipoles that are far larger than those of the shells.
    """
    total, size_of_terms = 0.0, 0.0
    for a in range(a0, a1):
        wa = powers_a[a]
        az, ay, ax = wa & 255, (wa >> 8) & 255, wa >> 16
        for b in range(b0, b1):
            wb = powers_b[b]
            bz, by, bx = wb & 255, (wb >> 8) & 255, wb >> 16
            if pz <= az + bz and py <= ay + by and px <= ax + bx:
                ez = e[(az * (lb + 1) + bz) * nt + pz]
                ey = e[size + (ay * (lb + 1) + by) * nt + py]
                ex = e[2 * size + (ax * (lb + 1) + bx) * nt + px]
                term = weights_a[a] * weights_b[b] * ez * ey * ex
                total += term
                size_of_terms += abs(term)
    return total if abs(total) > NOISE * size_of_terms else 0.0


@cache
def single_reach(l, pure):
    """Which Hermite functions each angular component of a single shell reaches, shape (ncomp, nherm(l)) of bool.

    A solid harmonic of degree l of x, y and z is, on its own centre, the same solid harmonic of derivatives of an s
    function, times (2 zeta)^-l: only |q| = l, and its monomials. A Cartesian monomial also reaches lower powers of the
    same parity along each axis.
    """
    start, powers, _ = component_table(l, pure)
    triples = hermite_triples(l)
    reached = np.zeros((len(start) - 1, len(triples)), dtype=bool)
    for component, (i, j) in enumerate(pairwise(start)):
        for power in monomials(powers[i:j]):
            below = (triples <= power) & ((np.array(power) - triples) % 2 == 0)
            reached[component] |= (triples == power).all(axis=1) if pure else below.all(axis=1)
    return reached


def monomials(powers):
    """The triples of packed powers, as a set."""
    return {(w & 255, (w >> 8) & 255, w >> 16) for w in powers.tolist()}


@cache
def first_function(l, pure, single):
    """Ordinal of the first Hermite function that counts for shell pairs of degree l, or for single shells."""
    return int(single_reach(l, pure).any(axis=0).argmax()) if single else 0


@cache
def structure(la, lb, pure, nctr_a=1, nctr_b=1, single=False):
    """`nonzero_elements` as a tuple of pairs."""
    return tuple(map(tuple, nonzero_elements(la, lb, pure, nctr_a, nctr_b, single).tolist()))


@cache
def nonzero_elements(la, lb, pure, nctr_a=1, nctr_b=1, single=False):
    """The elements (ab, p) of H that can be nonzero by their powers of z, y and x; shape (n, 2), row by row.

    `single`: of single shells a; b is the unit function.
    """
    row, p = (np.argwhere(single_reach(la, pure)) if single else plain_elements(la, lb, pure)).T
    ncomp_a, ncomp_b = (len(component_table(l, pure)[0]) - 1 for l in (la, lb))
    (a, b), (ca, cb) = np.divmod(row, ncomp_b), np.ogrid[:nctr_a, :nctr_b]
    rows = ((ca[..., None] * ncomp_a + a) * nctr_b + cb[..., None]) * ncomp_b + b
    return in_rows(rows.reshape(-1), np.broadcast_to(p, rows.shape).reshape(-1))


def in_rows(row, p):
    """Elements (row, p) row by row, as an array that nobody may write."""
    order = np.lexsort((p, row))
    elements = np.stack([row[order], p[order]], axis=1)
    elements.flags.writeable = False
    return elements


def plain_elements(la, lb, pure):
    """`nonzero_elements` for one contracted function in each shell."""
    tables = [component_table(l, pure) for l in (la, lb)]
    reach = [[np.array([*monomials(powers[i:j])]) for i, j in pairwise(start)] for start, powers, _ in tables]
    elements, triples = [], hermite_triples(la + lb)
    for a, monomials_a in enumerate(reach[0]):
        for b, monomials_b in enumerate(reach[1]):
            below = np.zeros((la + lb + 1,) * 3, dtype=bool)
            below[tuple((monomials_a[:, None] + monomials_b).reshape(-1, 3).T)] = True
            for axis in range(3):  # true where a sum of powers is as high or higher in all directions
                below = np.flip(np.logical_or.accumulate(np.flip(below, axis), axis), axis)
            found = np.flatnonzero(below[tuple(triples.T)])
            elements.append(np.stack([np.full_like(found, a * len(reach[1]) + b), found], axis=1))
    return np.concatenate(elements)
