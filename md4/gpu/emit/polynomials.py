"""Gamma H of a quartet by polynomials, and its product with r; see `md4.gpu.kernels.reverse_lanes`.

A polynomial is a dict from powers (z, y, x) to values.
"""

from functools import cache
from itertools import pairwise
from math import comb, prod

import numpy as np

from md4.gpu.emit.instructions import GLOBAL, load, shared_real, shuffled, store
from md4.gpu.emit.values import FP64, OPEN, f64, fma, i32, i64, multiply_add, tuple_of, word
from md4.method.angular import hermite_triples
from md4.method.hermite import component_table


@cache
def components(l, pure):
    """Of each angular component of a shell, its monomials and their weights."""
    start, powers, weights = component_table(l, pure)
    monomials = [(w & 255, (w >> 8) & 255, w >> 16) for w in powers.tolist()]
    return [list(zip(monomials[i:j], weights[i:j].tolist())) for i, j in pairwise(start.tolist())]


def raised(powers, axis, by=1):
    """Powers of which one is higher."""
    return *powers[:axis], powers[axis] + by, *powers[axis + 1 :]


def add_to(found, powers, value, factor=1.0):
    """Adds a value times a factor to a coefficient."""
    if powers in found:
        found[powers] = found[powers] + value if factor == 1.0 else fma(factor, value, found[powers])
    else:
        found[powers] = value if factor == 1.0 else value * factor


def add_times_axis(found, polynomial, axis, shift):
    """Adds a polynomial times (x + shift), x that of an axis."""
    for powers, value in polynomial.items():
        add_to(found, raised(powers, axis), value)
        add_to(found, powers, value, shift)


def product_polynomial(column, of_c, of_d, lc, ld, from_c, from_d):
    """sum_cd Gamma[cd] c d about P, by P - C and P - D; `from_c` is empty where P is C.

    Not about C or D and then moved: where P is close to one of them that loses digits by the square of their distance.
    `column(d)` gives Gamma[cd] of all c. Each monomial of d is taken as early as can be, since registers are few.
    """

    @cache
    def of_component(d):
        found = {}
        for gamma, terms in zip(column(d), of_c):
            for powers, weight in terms:
                add_to(found, powers, gamma, weight)
        move(found, lc, from_c)
        return found

    def of_multiples(monomial, first, degree):
        """The polynomial that belongs to d beyond a monomial, of so many more axes, the `first` one or later ones."""
        found = {}
        for axis in range(first, 3 if degree else first):
            add_times_axis(found, of_multiples(raised(monomial, axis), axis, degree - 1), axis, from_d[axis])
        for d, terms in enumerate(of_d if degree == 0 else ()):
            for powers, value in of_component(d).items() if monomial in dict(terms) else ():
                add_to(found, powers, value, dict(terms)[monomial])
        return found

    return of_multiples((0, 0, 0), 0, ld)


def lines(degree, axis):
    """Of the powers up to a degree, those that differ along an axis only, each a list in the order of that power."""
    for first in hermite_triples(degree).tolist():
        if first[axis] == 0:
            yield [raised(tuple(first), axis, n) for n in range(degree - sum(first) + 1)]


def move(polynomial, degree, shifts):
    """A polynomial in x + shift as one in x, in its place."""
    for axis, shift in enumerate(shifts):
        for line in lines(degree, axis):
            for lowest in range(len(line) - 1):
                for low, high in reversed([*pairwise(line)][lowest:]):
                    if high in polynomial:
                        add_to(polynomial, low, polynomial[high], shift)


def to_hermite(polynomial, degree, half):
    """A polynomial about P times a Gaussian of exponent p, in Hermite Gaussians over (1/2p)^|q|; `half` is 1/2p.

    x^n = sum_k n! / (2^k k! (n - 2k)!) (1/2p)^(n - k) Lambda_(n - 2k).
    """
    powers_of_half = [half]
    for _ in range(degree // 2 - 1):
        powers_of_half.append(powers_of_half[-1] * half)
    for axis in range(3):
        for line in lines(degree, axis):
            for n, low in enumerate(line):
                for k, high in enumerate(line[n + 2 :: 2], 1):
                    if high in polynomial:
                        # (2k - 1)!! ways to take k pairs out of 2k
                        count = comb(n + 2 * k, n) * prod(range(1, 2 * k, 2))
                        add_to(polynomial, low, polynomial[high], powers_of_half[k - 1] * float(count))


@cache
def make_lane_products(lc, ld, pure, single, functions):
    """Intrinsic (Z, gamma, c_step, d_step, from_c, from_d, half, coefficient, r) -> Z + Gamma H r, of one function ab.

    Z of the `functions` p, each the powers of one, is a tuple. The cd are those of two contracted functions, whose
    `coefficient` is the product of both; `half` is 1/2p. Addresses are the lane's: in global memory of Gamma[cd], so
    many bytes from one c, or d, to the next, and of P - C and P - D; in shared memory of r. H has the sign (-1)^|q|. On
    its own centre a solid harmonic of a `single` shell is that of derivatives.
    """
    of_c, of_d, degree = components(lc, pure), components(ld, pure), lc + ld
    every, tuples = hermite_triples(degree + max(map(sum, functions))).tolist(), tuple_of(FP64, len(functions))

    @word(tuples, tuples, *[i64] * 5, f64, f64, i32)
    def lane_products(z, gamma, c_step, d_step, from_c, from_d, half, coefficient, r):
        def vector(address):
            return [load("global.nc", address, 8 * n)[0] for n in range(3)]

        of_centres = [] if single or lc == 0 else vector(from_c), [] if ld == 0 else vector(from_d)
        places = [gamma]
        for _ in range(len(of_c) - 1):
            places.append(places[-1] + c_step)

        def column(d):
            return [load("global.nc", place + d_step * d if d else place)[0] for place in places]

        w = product_polynomial(column, of_c, of_d, lc, ld, *of_centres)
        if not (single and pure):
            to_hermite(w, degree, half)
        scales = [coefficient]
        for _ in range(degree):
            scales.append(scales[-1] * -half)
        w = {powers: value * scales[sum(powers)] for powers, value in w.items()}
        for n, t in enumerate(every):
            met = [(m, q) for m, p in enumerate(functions) if (q := tuple(np.subtract(t, p).tolist())) in w]
            r_t = shared_real(r, 8 * n) if met else None
            for m, q in met:
                z[m] = multiply_add(w[q], r_t, z[m])
        return z

    return lane_products


@cache
def make_add_lanes(count):
    """Intrinsic (Z, mask) -> the sums of `count` numbers of two lanes, whose numbers differ in a bit."""

    @word(tuple_of(FP64, count), tuple_of(FP64, count), i32)
    def add_lanes(z, mask):
        return [value + shuffled(value, "bfly", mask) for value in z]

    return add_lanes


@cache
def make_add_to_z(functions):
    """Intrinsic (Z, array, first, stride): adds (-1)^|p| Z of each of the functions p to Z in memory.

    That of the p-th is array[first + p // 8 stride + p % 8].
    """

    @word(None, tuple_of(FP64, len(functions)), OPEN, i64, i64)
    def add_to_z(z, array, first, stride):
        place = array.at(first)
        for block in range(0, len(functions), 8):
            numbers = [-value if sum(p) % 2 else value for value, p in list(zip(z, functions))[block : block + 8]]
            before = [load("global", place, 8 * n)[0] for n in range(len(numbers))]
            for n, (old, value) in enumerate(zip(before, numbers)):
                store(place, [old + value], 8 * n, GLOBAL)
            place = place + stride * 8

    return add_to_z
