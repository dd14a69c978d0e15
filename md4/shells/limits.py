"""Limits of shells: within them, no integral of a `Basis` leaves the range of double precision.

The first number to leave the range is [0]^(L) of a quartet of pairs with total exponents p and q (see
`md4.method.zeros`),

    |[0]^(L)| <= 2 pi^(5/2) / (p q sqrt(p + q)) (2 rho)^L ,    rho = p q / (p + q) ,

It is largest and smallest in quartets (ab|ab), up to a factor that the margins below cover: 18 p^(2 l - 5/2) with
l = la + lb. From this follow the largest exponent of a shell, given the highest l that it can be paired with, and the
smallest exponent, for pairs with itself. The range is 1e-10 to 1e10 for l = 8, and 1.4e-22 to 1.8e22 for l = 4. For s
and p functions the products p q limit it to 1e-100 to 1e100. Below the smallest exponent, terms underflow that matter
where shells are as far apart as they are wide.

Coefficients are limited relative to those of normalised primitives, because the Schwarz inequality bounds integrals by
their fourth power. Coordinates are limited because H matrices contain powers of distances up to the 16th.
"""

from functools import cache
from math import pi, sqrt

from md4.method.boys import MMAX

LARGEST_ZERO, SMALLEST_ZERO = 1e306, 1e-290  # of [0]^(L); its products with H matrices are nearer to 1
LARGEST_EXPONENT, SMALLEST_EXPONENT = 1e100, 1e-100  # of any shell, in Bohr^-2
LARGEST_COEFFICIENT = 1e30  # of a normalised primitive
LARGEST_COORDINATE = 1e12  # in Bohr
PREFACTOR = 2 * pi**2.5 / sqrt(2)


def power(l):
    """The power of p in [0]^(2l) of a quartet (ab|ab) with la + lb = l; 2l is at most MMAX."""
    return 2 * min(l, MMAX // 2) - 2.5


@cache
def largest_exponent(l, partner):
    """Largest exponent (Bohr^-2) of a shell of angular momentum `l` in pairs with shells up to l = `partner`."""
    n = power(l + partner)
    return min(LARGEST_EXPONENT, 0.5 * (LARGEST_ZERO / PREFACTOR) ** (1 / n)) if n > 0 else LARGEST_EXPONENT


@cache
def smallest_exponent(l):
    """Smallest exponent (Bohr^-2) of a shell of angular momentum `l`."""
    n = power(2 * l)
    return max(SMALLEST_EXPONENT, 0.5 * (SMALLEST_ZERO / PREFACTOR) ** (1 / n)) if n > 0 else SMALLEST_EXPONENT
