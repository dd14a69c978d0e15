"""Rotations: of a planar molecule into a plane of constant z, and of the functions of its shells.

Let R be a rotation, and chi_m(r) = S_m(r - A) f(|r - A|) the functions of a shell at A. The functions chi'_m of the
same shell at R A, along the same axes x, y and z, are combinations of them if their argument is turned as well:

    chi'_m(R r) = sum_n T_mn chi_n(r)     with     S_m(R r) = sum_n T_mn S_n(r)

For real solid harmonics T is orthogonal, for Cartesian functions it is not. With B = T^-1, which is the T of R^-1, a
density D and matrices such as J of the molecule as it is follow from those of the turned one, and the other way round:

    D' = B^T D B     and     J = B J' B^T .

So sum_ij D_ij chi_i chi_j is the same density, and so is its potential.
"""

from functools import cache
from math import factorial

import numpy as np

from md4.method.angular import (
    cartesian_triples,
    component_coefficients,
    hermite_ordinal,
    ncart,
    nherm,
)

# The largest distance from a plane that rounding explains, in units of the largest distance between centres. A rotation
# of coordinates and a change of their unit leave up to 4 epsilon. Integrals change by no more than their own rounding.
PLANAR = 16 * np.finfo(float).eps


def cartesian_rotation(l, rotation):
    """M with (R r)^t = sum_u M[t, u] r^u for the monomials of degree l; shape (ncart(l), ncart(l))."""
    if l == 0:
        return np.ones((1, 1))
    lower, triples = cartesian_rotation(l - 1, rotation), cartesian_triples(l - 1)
    places = [hermite_ordinal(*(triples + one).T) - nherm(l - 1) for one in np.eye(3, dtype=np.int64)]
    turned = np.zeros((ncart(l), ncart(l)))
    for axis in range(3):  # monomials that are this coordinate times one of degree l - 1
        rows = np.zeros((len(lower), ncart(l)))
        for other in range(3):
            rows[:, places[other]] += rotation[axis, other] * lower
        turned[places[axis]] = rows
    return turned


@cache
def dual_components(l, pure):
    """Coefficients (ncart(l), ncomp) that pick a component: C^T M times them is T where C^T M = T C^T.

    Let the product of two monomials of degree l be zero if they differ, and x! y! z! / l! of their powers if not. No
    rotation changes this product. So the solid harmonics are orthogonal, of equal norms, and no digits are lost.
    """
    c = component_coefficients(l, pure)
    weights = [factorial(x) * factorial(y) * factorial(z) / factorial(l) for x, y, z in cartesian_triples(l).tolist()]
    weighted = c * np.array(weights)[:, None]
    return weighted / (c * weighted).sum(axis=0)


def component_rotation(l, pure, rotation):
    """T with S_m(R r) = sum_n T[m, n] S_n(r) for the angular components of a shell; shape (ncomp, ncomp).

    Parameters
    ----------
    l : int
    pure : bool
    rotation : ndarray, shape (3, 3)
        R, whose rows and columns are x, y and z.
    """
    return component_coefficients(l, pure).T @ cartesian_rotation(l, rotation) @ dual_components(l, pure)


def plane_normal(vectors):
    """The unit vector, with z >= 0, that is at right angles to all vectors to within rounding; None if there is none.

    Parameters
    ----------
    vectors : ndarray, shape (n, 3)
        They may all have one direction, but not all be zero.
    """
    lengths = np.sqrt((vectors * vectors).sum(axis=1))
    limit = PLANAR * lengths.max()
    along = vectors[lengths.argmax()] / lengths.max()
    across = vectors - (vectors * along).sum(axis=1)[:, None] * along
    distances = np.sqrt((across * across).sum(axis=1))
    widest = across[distances.argmax()]
    if distances.max() <= limit:  # all planes through a line contain it
        widest = np.eye(3)[abs(along).argmin()]
    normal = np.cross(along, widest)
    normal /= np.sqrt((normal * normal).sum())
    if (abs((vectors * normal).sum(axis=1)) > limit).any():
        return None
    return -normal if normal[2] < 0 else normal


def rotation_to_z(normal):
    """The rotation by the smallest angle that turns a unit vector with z >= 0 to the z axis; shape (3, 3)."""
    x, y, z = normal
    xx, xy, yy = (product / (1 + z) for product in (x * x, x * y, y * y))
    return np.array([[1 - xx, -xy, -x], [-xy, 1 - yy, -y], [x, y, z]])


def turned_to_plane(centres):
    """A rotation R, and centres turned by it that have exactly z = 0, where all are in a plane to within rounding.

    The first centre becomes the origin. The other ones are moved by rounding only: `PLANAR` times the largest distance
    between them and the first one at most. Products are summed by NumPy rather than by BLAS, so that all processes
    that share a build have the same bits, and shells at one centre stay together.

    Parameters
    ----------
    centres : ndarray, shape (n, 3)
        (x, y, z) of each, not all the same.

    Returns
    -------
    rotation : ndarray, shape (3, 3)
    turned : ndarray, shape (n, 3)
        Both are None if there is no plane.
    """
    vectors = centres - centres[:1]
    normal = plane_normal(vectors)
    if normal is None:
        return None, None
    rotation = rotation_to_z(normal)
    turned = (vectors[:, None, :] * rotation).sum(axis=2)
    turned[:, 2] = 0.0
    return rotation, turned
