"""H matrices by the device functions of `md4.method.hermite`, run as plain Python."""

import numpy as np

from md4.method import hermite
from md4.method.angular import hermite_triples


def axis_table(la, lb, p, xpa, xpb):
    """E_t^{ij} of one axis as [i][j][t], filled in the order that `e_coefficient` needs."""
    nt = la + lb + 1
    e = np.zeros(hermite.axis_size(la, lb))
    for i in range(la + 1):
        for j in range(lb + 1):
            for t in range(nt):
                e[(i * (lb + 1) + j) * nt + t] = hermite.e_coefficient(i, j, t, lb, nt, 0.5 / p, xpa, xpb, e, 0)
    return e.reshape(la + 1, lb + 1, nt)


def plain_h(la, lb, pure, p, pa, pb, elements):
    """Angular part of some elements (ab, p) of H of a primitive pair.

    Parameters
    ----------
    p : float
        Exponent of the pair.
    pa, pb : array_like, shape (3,)
        P - A and P - B in the order z, y, x.
    elements : iterable of (int, int)
        Rows, of one contracted function in each shell, and Hermite functions.
    """
    e = np.concatenate([axis_table(la, lb, p, pa[x], pb[x]).ravel() for x in range(3)]).tolist()
    tables = [[column.tolist() for column in hermite.component_table(l, pure)] for l in (la, lb)]
    (start_a, *terms_a), (start_b, *terms_b) = tables
    triples, more = hermite_triples(la + lb).tolist(), (lb, la + lb + 1, hermite.axis_size(la, lb), e)

    def element(row, function):
        a, b = divmod(row, len(start_b) - 1)
        ends_a, ends_b = start_a[a : a + 2], start_b[b : b + 2]
        return hermite.h_element(*ends_a, *terms_a, *ends_b, *terms_b, *triples[function], *more)

    return np.array([element(*which) for which in elements])
