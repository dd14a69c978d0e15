"""1-index Hermite integrals r[t]^(m) from [0]^(m).

    r[t]^(m) = (t_i - 1) r[t - 2e_i]^(m+1) + R_i r[t - e_i]^(m+1),     R = P - Q  (Eq. 15 of arXiv:2307.03452)

for m falling from L to 0; step m makes the triples of degree 1 to L - m. Any axis i with t_i > 0 can be used.

The axes can also be taken one after the other. The recurrence gives r^(m) of (0, 0, z), and then of (0, y, z). Along x
only m = 0 is needed, and for each column (y, z) it follows from the r^(m) in closed form,

    r[x, y, z]^(0) = sum_i c(x, i) R_x^(x - 2i) r[0, y, z]^(x - i),     c(x, i) = x! / (2^i i! (x - 2i)!),

so that a column of n elements takes about n^2 / 2 steps, and only columns are kept.
"""

from functools import cache
from math import factorial

import numpy as np

from md4.method.angular import hermite_ordinal, hermite_triples


@cache
def recurrence_table(l):
    """Shape (nherm(l), 2), int32: what `r_step` needs for each triple t.

    Word 0: idx(t - e_i) + 2^16 idx(t - 2e_i); word 1: axis i + 2^8 (t_i - 1).
    """
    words = np.zeros((len(hermite_triples(l)), 2), dtype=np.int32)
    for n, t in enumerate(hermite_triples(l).tolist()):
        if n == 0:
            continue
        axis = max(i for i in range(3) if t[i] > 0)
        one, two = list(t), list(t)
        one[axis] -= 1
        two[axis] -= 2
        second = hermite_ordinal(*two) if t[axis] > 1 else 0
        words[n] = hermite_ordinal(*one) + (second << 16), axis + ((t[axis] - 1) << 8)
    return words


def r_step(indices, rule, rx, ry, rz, old, base):
    """r[t]^(m) from r^(m+1) in old[base:] by the two words of `recurrence_table` (device function)."""
    axis = rule & 255
    r = rx if axis == 0 else (ry if axis == 1 else rz)
    return (rule >> 8) * old[base + (indices >> 16)] + r * old[base + (indices & 65535)]


def polynomial_coefficient(x, i):
    """c(x, i) of this module's head, an integer."""
    return factorial(x) // (2**i * factorial(i) * factorial(x - 2 * i))


def columns(zero, axis, multiply, multiply_add):
    """Columns r[n]^(m), m = 0..L-n, of one axis for n = 0, 1, ..., L, from the column of n = 0; yields lists.

    The numbers may be of any type for which `multiply(a, b)` = a b and `multiply_add(a, b, c)` = a b + c are given; a
    may be an integer.
    """
    before, here = None, list(zero)
    for n in range(len(zero)):
        yield here
        after = [multiply(axis, value) for value in here[1:]]
        if n > 0:
            after = [multiply_add(n, low, value) for low, value in zip(before[1:], after)]
        before, here = here, after


def along_column(column, axis, squared, multiply, multiply_add):
    """r[x]^(0), x = 0..L, from the column r[0]^(m), m = 0..L, by Horner's rule in R_x^2; yields values."""
    for x in range(len(column)):
        value = column[x]
        for i in range(1, x // 2 + 1):
            low = multiply(polynomial_coefficient(x, i), column[x - i])
            value = multiply_add(value, squared, low)
        yield multiply(axis, value) if x % 2 else value


def by_columns(zero, axes, multiply, multiply_add):
    """Yields (ordinal, r[t]^(0)) of all triples up to L from [0]^(0..L), by columns; for numbers see `columns`."""
    squared = multiply(axes[0], axes[0])
    for z, at_z in enumerate(columns(zero, axes[2], multiply, multiply_add)):
        for y, at_yz in enumerate(columns(at_z, axes[1], multiply, multiply_add)):
            for x, value in enumerate(along_column(at_yz, axes[0], squared, multiply, multiply_add)):
                yield hermite_ordinal(x, y, z), value
