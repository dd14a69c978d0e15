"""Index maps of Hermite and Cartesian functions, and Cartesian -> real solid harmonic coefficients.

Hermite triples t = (i, j, k) are ordered by l = i+j+k, then s = j+k, then k, so that the ordinal

    idx(t) = l(l+1)(l+2)/6 + s(s+1)/2 + k

is compact and nearly additive:

    idx(p+q) = idx(p) + idx(q) + s_p s_q + l_p l_q (l_p + l_q + 2)/2 .

By the last identity a kernel finds [p+q] from the packed words of p and q with a few integer operations. The Cartesian
components of one l have the same order of (x, y, z), which is that of PySCF: xx xy xz yy yz zz. In the engine i, j and
k count along z, y and x (`AXES`), so that Hermite functions with the same power of z have consecutive ordinals, see
`md4.gpu.staircases`.
"""

from functools import cache
from math import comb, factorial, pi, sqrt

import numpy as np

# The axis (0, 1, 2 for x, y, z) to which each number of a Hermite triple belongs.
AXES = [2, 1, 0]
# A coefficient of a solid harmonic that is smaller than this times the largest one is zero but for rounding.
NOISE = 1e-14


def ncart(l):
    """Number of Cartesian functions of degree l."""
    return (l + 1) * (l + 2) // 2


def npure(l):
    """Number of real solid harmonics of degree l."""
    return 2 * l + 1


def nherm(l):
    """Number of Hermite functions of degree 0 to l: the pyramidal number (l+1)(l+2)(l+3)/6."""
    return (l + 1) * (l + 2) * (l + 3) // 6


def hermite_ordinal(i, j, k):
    """Ordinal of the Hermite triple (i, j, k)."""
    s = j + k
    l = i + s
    return l * (l + 1) * (l + 2) // 6 + s * (s + 1) // 2 + k


@cache
def cartesian_triples(l):
    """Shape (ncart(l), 3), int64: the triples of degree l in order."""
    return np.array([(l - s, s - z, z) for s in range(l + 1) for z in range(s + 1)], dtype=np.int64)


@cache
def packed_powers(l):
    """Shape (ncart(l),), int32: powers i + 2^8 j + 2^16 k, along the axes of Hermite triples, of each component."""
    i, j, k = cartesian_triples(l)[:, AXES].T
    return (i + (j << 8) + (k << 16)).astype(np.int32)


@cache
def hermite_triples(l):
    """Shape (nherm(l), 3), int64: the triples of degree 0 to l in order of their ordinal."""
    return np.concatenate([cartesian_triples(k) for k in range(l + 1)])


@cache
def packed_hermite(l):
    """Shape (nherm(l),), int32: ordinal + 2^16 s + 2^24 degree of each triple; see `sum_ordinal`."""
    t = hermite_triples(l)
    s, degree = t[:, 1] + t[:, 2], t.sum(axis=1)
    return (np.arange(len(t)) + (s << 16) + (degree << 24)).astype(np.int32)


def sum_ordinal(p, q):
    """idx(p+q) from two packed words (device function)."""
    sp, sq = (p >> 16) & 255, (q >> 16) & 255
    lp, lq = (p >> 24) & 127, (q >> 24) & 127
    return (p & 65535) + (q & 65535) + sp * sq + ((lp * lq * (lp + lq + 2)) >> 1)


@cache
def solid_harmonics(l):
    """Cartesian -> real solid harmonic coefficients C, shape (ncart(l), 2l+1), for unit radial functions.

    The columns have the order m = -l..l, but x, y, z for p (PySCF's order). The solid harmonics r^l Y_lm have unit
    angular norm. This is equation 15 of Schlegel and Frisch, Int. J. Quantum Chem. 54, 83 (1995), in its real form.
    """
    c = np.zeros((ncart(l), 2 * l + 1))
    for m in range(l + 1):
        norm = sqrt((2 * l + 1) / (4 * pi) * factorial(l - m) / factorial(l + m) * (2 if m else 1)) / 2**l
        for k in range((l - m) // 2 + 1):
            legendre = (-1) ** k * comb(l, k) * comb(2 * l - 2 * k, l)
            legendre = legendre * factorial(l - 2 * k) // factorial(l - 2 * k - m)
            for j in range(k + 1):
                for i in range(k - j + 1):
                    radial = legendre * factorial(k) // (factorial(i) * factorial(j) * factorial(k - i - j))
                    for n in range(m + 1):
                        sign = (1, 1, -1, -1)[n % 4]
                        x, y, z = 2 * i + m - n, 2 * j + n, l - m - 2 * (i + j)
                        row = hermite_ordinal(x, y, z) - nherm(l - 1)
                        c[row, l + (m if n % 2 == 0 else -m)] += sign * norm * radial * comb(m, n)
    c[abs(c) < NOISE * abs(c).max()] = 0.0
    return np.ascontiguousarray(c[:, [2, 0, 1]]) if l == 1 else c


@cache
def component_coefficients(l, pure):
    """Coefficients (ncart(l), ncomp) from Cartesian monomials to the AO components of a shell.

    Cartesian AOs are monomials without a norm, but s and p include their angular norm (libcint's convention).
    """
    if pure or l < 2:
        return solid_harmonics(l)
    return np.eye(ncart(l))
