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

from md4.method.angular import AXES

OF_A, OF_B = (1, 2, 3), (4, 5, 6)


def axis_of(derivative):
    """The place of a derivative's axis in Hermite triples, which are ordered as z, y, x."""
    return AXES[(derivative - 1) % 3]
