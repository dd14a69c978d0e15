"""Derivatives of shell pairs by the places of their centres.

With R = A - B and s = za/p, the product of two primitives changes with A by s d/dP + d/dR, with B by (1 - s) d/dP -
d/dR. Hermite functions depend on P only, and d/dP_i raises p by one along i; H depends on R only. So a derivative of a
pair is a sum of Hermite functions of one degree more,

    H^{A_i}[ab, p] = s H[ab, p - 1_i] + dH/dR_i[ab, p],     |p| <= l_a + l_b + 1,

and needs no other integrals. As the derivative of a Gaussian of power i is 2 za times that of i + 1, less i times that
of i - 1, H^A is H with other coefficients along one axis:

    2 za E_t^{i+1,j} - i E_t^{i-1,j}  for A,       2 zb E_t^{i,j+1} - j E_t^{i,j-1}  for B.

The derivatives by x, y and z of A have the numbers 1, 2 and 3, those by B 4, 5 and 6.
"""

from functools import cache

import numpy as np

from md4.method.angular import AXES, hermite_ordinal, hermite_triples, nherm
from md4.method.hermite import nonzero_elements

OF_A, OF_B = (1, 2, 3), (4, 5, 6)


def axis_of(derivative):
    """The place of a derivative's axis in Hermite triples, which are ordered as z, y, x."""
    return AXES[(derivative - 1) % 3]


@cache
def derived_elements(la, lb, pure, nctr_a, nctr_b, single, derivatives):
    """`md4.method.hermite.nonzero_elements` of derivatives, whose rows are (derivative, a, b).

    A derivative along an axis reaches one power more of it, and what the pair reaches: not so of single shells, whose
    derivatives are those of their Hermite functions, no others.
    """
    row, p = nonzero_elements(la, lb, pure, nctr_a, nctr_b, single).T
    found = np.zeros((len(derivatives), row[-1] + 1, nherm(la + lb + 1)), dtype=bool)
    for block, derivative in zip(found, derivatives):
        above = hermite_triples(la + lb).copy()
        above[:, axis_of(derivative)] += 1
        block[row, hermite_ordinal(*above.T)[p]] = True
        if not single:
            block[row, p] = True
    elements = np.argwhere(found.reshape(-1, found.shape[2]))
    elements.flags.writeable = False
    return elements


def axis_derivatives(e, here, power, step, twice):
    """The coefficient along one axis of a derivative: `twice` times that of one power more, less `power` times that of
    one power less, `step` away from the one at `here` in `e` (device function)."""
    value = twice * e[here + step]
    if power > 0:
        value -= power * e[here - step]
    return value


def make_h_derivatives(axis_derivatives, noise):
    """The device function that returns H^A along z, y and x, and H^B, of a row of components and p = (pz, py, px).

    Its arguments are those of `md4.method.hermite.h_element`, whose E reach one power further in a and b: `lb` is
    that of E, l_b + 1, and 2 za and 2 zb follow.
    """

    def h_derivatives(
        a0, a1, powers_a, weights_a, b0, b1, powers_b, weights_b, pz, py, px, lb, nt, size, e, two_a, two_b
    ):
        az_, ay_, ax_, bz_, by_, bx_ = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        saz, say, sax, sbz, sby, sbx = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        step = (lb + 1) * nt
        for a in range(a0, a1):
            wa = powers_a[a]
            az, ay, ax = wa & 255, (wa >> 8) & 255, wa >> 16
            for b in range(b0, b1):
                wb = powers_b[b]
                bz, by, bx = wb & 255, (wb >> 8) & 255, wb >> 16
                if pz <= az + bz + 1 and py <= ay + by + 1 and px <= ax + bx + 1:
                    z, y = az * step + bz * nt + pz, size + ay * step + by * nt + py
                    x, w = 2 * size + ax * step + bx * nt + px, weights_a[a] * weights_b[b]
                    yx, zx, zy = w * e[y] * e[x], w * e[z] * e[x], w * e[z] * e[y]
                    term = axis_derivatives(e, z, az, step, two_a) * yx
                    az_ += term
                    saz += abs(term)
                    term = axis_derivatives(e, y, ay, step, two_a) * zx
                    ay_ += term
                    say += abs(term)
                    term = axis_derivatives(e, x, ax, step, two_a) * zy
                    ax_ += term
                    sax += abs(term)
                    term = axis_derivatives(e, z, bz, nt, two_b) * yx
                    bz_ += term
                    sbz += abs(term)
                    term = axis_derivatives(e, y, by, nt, two_b) * zx
                    by_ += term
                    sby += abs(term)
                    term = axis_derivatives(e, x, bx, nt, two_b) * zy
                    bx_ += term
                    sbx += abs(term)
        return (
            az_ if abs(az_) > noise * saz else 0.0, ay_ if abs(ay_) > noise * say else 0.0,
            ax_ if abs(ax_) > noise * sax else 0.0, bz_ if abs(bz_) > noise * sbz else 0.0,
            by_ if abs(by_) > noise * sby else 0.0, bx_ if abs(bx_) > noise * sbx else 0.0,
        )  # fmt: skip

    return h_derivatives


def one_derivative(found, derivative):
    """The one with a number of what `h_derivatives` returns (device function)."""
    z, y, x = found[0], found[1], found[2]
    if derivative > 3:
        z, y, x = found[3], found[4], found[5]
    axis = derivative % 3
    return x if axis == 1 else (y if axis == 2 else z)
