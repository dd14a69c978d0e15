"""J in the Hermite basis: the way in which J alone is built, without transforming integrals.

    D_q = sum_cd H[cd, q] w_cd (D_cd + D_dc)      of each primitive pair; w = 1/2 if c and d are the same shell, else 1
    J_p = sum_q r[p+q] D_q                        over all primitive pairs
    Y_ab = w_ab sum_p H[ab, p] J_p ,              J = Y + Y^T

H of both sides includes the sign (-1)^|q|, and so do D and J. For the side that is the bra, the sign is removed where r
is used. Each unordered pair of primitive pairs is taken once, and r[p+q] is used for both: J_p += r D_q and J_q += r
D_p. A primitive pair with itself adds half to each of the two, which are the same sum.
"""


import numpy as np

from md4.method.angular import hermite_triples


def hermite_bytes(pairs, width):
    """Bytes of D and J of a list for one density matrix, if each has `width` doubles for a primitive pair."""
    return 16 * pairs.nprim * width


def signs(l):
    """(-1)^|p| of the Hermite functions up to degree l, shape (nherm(l),)."""
    return 1.0 - 2.0 * (hermite_triples(l).sum(axis=1) % 2)


def pair_places(basis, pairs):
    """Rows and columns of the functions of each pair in an AO matrix, shapes (npair, na, 1) and (npair, 1, nb)."""
    first = basis.ao_loc[pairs.pairs]
    return first[:, 0, None, None] + np.arange(pairs.na)[:, None], first[:, 1, None, None] + np.arange(pairs.nb)


def pair_weights(pairs):
    """w_ab, shape (npair, 1)."""
    return np.where(pairs.pairs[:, :1] == pairs.pairs[:, 1:], 0.5, 1.0)


