"""1-index Hermite integrals r[t]^(m) from [0]^(m).

    r[t]^(m) = (t_i - 1) r[t - 2e_i]^(m+1) + R_i r[t - e_i]^(m+1),     R = P - Q  (Eq. 13 of arXiv:2307.03452)

for m falling from L to 0; step m makes the triples of degree 1 to L - m. Any axis i with t_i > 0 can be used. The axes
0, 1 and 2 of the triples are z, y and x (`md4.method.angular.AXES`), so that R = (R_z, R_y, R_x).

The axes can also be taken one after the other, which keeps fewer numbers. With t = (i, j, k), the recurrence gives
r^(m) of (0, 0, k), and then of (0, j, k). Along axis 0 only m = 0 is needed, and for each (j, k) it follows from the
r^(m) in closed form,

    r[i, j, k]^(0) = sum_n c(i, n) R_0^(i - 2n) r[0, j, k]^(i - n),     c(i, n) = i! / (2^n n! (i - 2n)!).

Where R_0 = 0 (`md4.method.mirror`) this is zero for odd i, and c(i, i/2) r[0, j, k]^(i/2) for even i.
"""

from functools import cache
from math import factorial

import numpy as np

from md4.method.angular import hermite_ordinal, hermite_triples


@cache
def recurrence_table(l):
    """Shape (nherm(l), 2), int32: one step of the recurrence for each triple t.

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


def by_axis(zeros, separation, multiply, multiply_add):
    """Yields (ordinal of t, r[t]^(0)) of all triples up to L, one axis after the other.

    Parameters
    ----------
    zeros : sequence
        [0]^(m), m = 0..L.
    separation : sequence
        R_z, R_y and R_x.
    multiply, multiply_add : callable
        multiply(a, b) is a b, and multiply_add(a, b, c) is a b + c, of whatever stands for numbers; a may be an int.
    """
    rz, ry, rx = separation
    squared = multiply(rz, rz)
    for k, of_k in enumerate(along_axis(zeros, rx, multiply, multiply_add)):
        for j, of_jk in enumerate(along_axis(of_k, ry, multiply, multiply_add)):
            for i, value in enumerate(along_last_axis(of_jk, rz, squared, multiply, multiply_add)):
                yield hermite_ordinal(i, j, k), value


def by_axis_in_plane(zeros, separation, multiply, multiply_add):
    """Yields (ordinal of t, r[t]^(0)) of all triples of even t_0 up to L, where R_0 = 0; those of odd t_0 are zero.

    Parameters
    ----------
    zeros, multiply, multiply_add
        As in `by_axis`.
    separation : sequence
        R_1 and R_2.
    """
    r1, r2 = separation
    for k, of_k in enumerate(along_axis(zeros, r2, multiply, multiply_add)):
        for j, of_jk in enumerate(along_axis(of_k, r1, multiply, multiply_add)):
            for n in range((len(of_jk) + 1) // 2):
                yield hermite_ordinal(2 * n, j, k), multiply(closed_form_coefficient(2 * n, n), of_jk[n])


def along_axis(lowest, r, multiply, multiply_add):
    """Yields for n = 0..L the list of r[n]^(m), m = 0..L-n, where n counts along one axis and `lowest` is r[0]^(m)."""
    before, here = None, list(lowest)
    for n in range(len(lowest)):
        yield here
        after = [multiply(r, value) for value in here[1:]]
        if n > 0:
            after = [multiply_add(n, low, value) for low, value in zip(before[1:], after)]
        before, here = here, after


def along_last_axis(lowest, r, squared, multiply, multiply_add):
    """Yields r[n]^(0), n = 0..L, from `lowest`, r[0]^(m), by the closed form; Horner's rule in `squared`, r^2."""
    for n in range(len(lowest)):
        value = lowest[n]
        for i in range(1, n // 2 + 1):
            low = multiply(closed_form_coefficient(n, i), lowest[n - i])
            value = multiply_add(value, squared, low)
        yield multiply(r, value) if n % 2 else value


def closed_form_coefficient(i, n):
    """c(i, n) of this module's docstring, an integer."""
    return factorial(i) // (2**n * factorial(n) * factorial(i - 2 * n))
