"""Oracle in arbitrary precision: integrals of two to four centres, of any l, by another method than the engine's.

Every operator is a superposition of Gaussians exp(-s^2 r12^2). For one of them a primitive quartet factorises into
x, y and z, and with  u = t^2 = s^2 / (rho + s^2)  each factor is a polynomial in u (Dupuis, Rys and King, J. Chem.
Phys. 65, 111 (1976)). Hence

    (ab|cd) = K_ab K_cd pi^3 / (pq)^(3/2)  sum_m [I_x I_y I_z]_m M_m ,      M_m = < t^2m > ,

where p = a + b, q = c + d, rho = pq/(p+q), T = rho |P - Q|^2, K_ab = exp(-ab/p |A - B|^2), and only the moments M_m
depend on the operator (theta = omega^2 / (rho + omega^2), U = zeta^2 / 4 rho):

    coulomb    1/r               2 sqrt(rho/pi) int_0^1            t^2m exp(-T t^2) dt
    erf        erf(omega r)/r    2 sqrt(rho/pi) int_0^sqrt(theta)  t^2m exp(-T t^2) dt
    erfc       erfc(omega r)/r   2 sqrt(rho/pi) int_sqrt(theta)^1  t^2m exp(-T t^2) dt
    yukawa     exp(-zeta r)/r    2 sqrt(rho/pi) int_0^1  t^2m exp(-T t^2 - U (1-t^2)/t^2) dt
    slater     exp(-zeta r)      -d/dzeta of yukawa:  zeta/(2 rho) (M_(m-1) - M_m)
    gaussian   exp(-omega r^2)   (1-theta)^(3/2) theta^m exp(-T theta),  theta = omega / (rho + omega)
    gaussian_coulomb             2 sqrt(rho/pi) (1-theta) int_0^1 u^m exp(-T u) dv,  u = theta + (1-theta) v^2,
               exp(-omega r^2)/r                                                     theta = omega / (rho + omega)

All of this holds for the function 1 as well, an s function of exponent 0: (ab|P) = (ab|P 1) and (P|Q) = (P 1|Q 1).

Nothing here is shared with the engine: no Hermite functions, no tables, not even the solid harmonics. Doubles in the
input are taken as exact binary numbers.
"""

from fractions import Fraction
from functools import cache
from itertools import product
from math import comb, factorial, log10, prod

import numpy as np
from mpmath import mp, mpf

from md4.errors import ArgumentError, UnsupportedError

SERIES_LIMIT = 100  # T up to which F_m comes from its series; beyond, upward recurrence loses nothing for m < 100

# ---- moments ---------------------------------------------------------------------------------------------------------


def boys(m, T, dps=40):
    """Boys function F_m(T) = int_0^1 t^2m exp(-T t^2) dt, T >= 0, to `dps` digits."""
    with mp.workdps(dps + 10):
        value = _boys(m, mpf(T))[m]
    with mp.workdps(dps):
        return +value


def _boys(mmax, T):
    """[F_0 .. F_mmax] at the precision in force.

    The last order is summed from its series, all of whose terms are positive, and the others follow by downward
    recursion:

        F_m = exp(-T) sum_k (2T)^k / ((2m+1)(2m+3) .. (2m+2k+1)) ,     F_m = (2T F_(m+1) + exp(-T)) / (2m+1) ;

    For large T the recursion runs upward from F_0 = sqrt(pi/T) erf(sqrt(T)) / 2.
    """
    if T > max(SERIES_LIMIT, 2 * mmax):
        return _upward(mmax, T, mp.sqrt(mp.pi / T) / 2 * mp.erf(mp.sqrt(T)), lambda m: -mp.exp(-T))
    e, term, total, k = mp.exp(-T), mpf(1) / (2 * mmax + 1), mpf(0), 0
    while term > mp.eps * total / 1000:
        total += term
        k += 1
        term *= 2 * T / (2 * mmax + 2 * k + 1)
    f = [e * total]
    for m in range(mmax - 1, -1, -1):
        f.append((2 * T * f[-1] + e) / (2 * m + 1))
    return f[::-1]


def _upward(mmax, T, first, boundary):
    """G_(m+1) = ((2m+1) G_m + boundary(m)) / (2T) from G_0 = `first`: integration by parts."""
    g = [first]
    for m in range(mmax):
        g.append(((2 * m + 1) * g[m] + boundary(m)) / (2 * T))
    return g


def _settled(evaluate):
    """The list `evaluate()` at the precision in force, computed with more and more digits until it no longer changes.

    So terms may cancel in `evaluate`: the number of digits that are lost is found by trial.
    """
    dps, tolerance = mp.dps, 4 * mp.eps
    work, old = dps + 20, None
    while True:
        with mp.workdps(work):
            new = evaluate()
            if old and all(abs(n - o) <= tolerance * abs(n) for n, o in zip(new, old)):
                break
        work, old = work + dps + work // 2, new
    return [+x for x in new]


def _erfc_moments(mmax, rho, T, omega):
    """int_sqrt(theta)^1 t^2m exp(-T t^2) dt, upward; the boundary terms are those at sqrt(theta) and at 1."""
    theta = omega**2 / (rho + omega**2)
    root = mp.sqrt(theta)
    if T == 0:
        return [(1 - root ** (2 * m + 1)) / (2 * m + 1) for m in range(mmax + 1)]
    first = mp.sqrt(mp.pi / T) / 2 * (mp.erfc(mp.sqrt(theta * T)) - mp.erfc(mp.sqrt(T)))
    return _upward(mmax, T, first, lambda m: root ** (2 * m + 1) * mp.exp(-theta * T) - mp.exp(-T))


def _yukawa_moments(mmax, rho, T, zeta):
    """[J_-1, J_0 .. J_mmax] of J_m = int_0^1 t^2m exp(-T t^2 - U (1-t^2)/t^2) dt, with U = zeta^2 / (4 rho).

    J_0 and J_-1 are sums of error functions, and integration by parts gives

        2T J_(m+1) = (2m+1) J_m + 2U J_(m-1) - exp(-T) .
    """
    U = zeta**2 / (4 * rho)
    x, y = mp.sqrt(T), mp.sqrt(U)
    minus = mp.exp(U - 2 * x * y) * mp.erfc(y - x)
    plus = mp.exp(U + 2 * x * y) * mp.erfc(y + x)
    j = [mp.sqrt(mp.pi) / (4 * y) * (minus + plus)]
    if T == 0:
        for m in range(mmax + 1):
            j.append((1 - 2 * U * j[m]) / (2 * m + 1))
        return j
    j.append(mp.sqrt(mp.pi) / (4 * x) * (minus - plus))
    for m in range(mmax):
        j.append(((2 * m + 1) * j[m + 1] + 2 * U * j[m] - mp.exp(-T)) / (2 * T))
    return j


def _slater_moments(mmax, rho, T, zeta):
    """zeta/(2 rho) (J_(m-1) - J_m); see `_yukawa_moments`."""
    j = _yukawa_moments(mmax, rho, T, zeta)
    return [zeta / (2 * rho) * (j[m] - j[m + 1]) for m in range(mmax + 1)]


def _gaussian_coulomb_moments(mmax, rho, T, omega):
    """(1-theta) G_m with G_m = int_0^1 u^m exp(-T u) dv, u = theta + (1-theta) v^2, for m = 0..mmax upward.

    Integration of d/dv [v u^m exp(-T u)] gives, since (1-theta) v^2 = u - theta,

        exp(-T) = (1 + 2m + 2 theta T) G_m - 2 theta m G_(m-1) - 2T G_(m+1) .
    """
    theta = omega / (rho + omega)
    if T == 0:
        g = [mpf(1)]
        for m in range(mmax):
            g.append((1 + 2 * theta * (m + 1) * g[m]) / (2 * m + 3))
    else:
        x = (1 - theta) * T
        g = [mp.exp(-theta * T) * mp.sqrt(mp.pi / x) / 2 * mp.erf(mp.sqrt(x))]
        for m in range(mmax):
            last = 2 * theta * m * g[m - 1] if m else 0
            g.append(((1 + 2 * m + 2 * theta * T) * g[m] - last - mp.exp(-T)) / (2 * T))
    return [(1 - theta) * value for value in g]


def moments(operator, mmax, rho, T):
    """Moments [M_0 .. M_mmax] of an operator at the mpmath precision in force; see the module's table.

    Parameters
    ----------
    operator : tuple (str, float or None)
        "coulomb", or "erf", "erfc", "yukawa", "slater", "gaussian", "gaussian_coulomb" with their parameter.
    mmax : int
        Highest power of u = t^2.
    rho, T : mpf
        Reduced exponent pq/(p+q) and rho |P - Q|^2.
    """
    name, parameter = operator
    x = None if parameter is None else mpf(parameter)
    factor = 2 * mp.sqrt(rho / mp.pi)
    if name == "gaussian":
        theta = x / (rho + x)
        weight = mp.sqrt(rho / (rho + x)) ** 3 * mp.exp(-T * theta)
        return [weight * theta**m for m in range(mmax + 1)]
    if name == "gaussian_coulomb":
        values = _settled(lambda: _gaussian_coulomb_moments(mmax, rho, T, x))
    elif name == "coulomb":
        values = _boys(mmax, T)
    elif name == "erf":
        theta = x**2 / (rho + x**2)
        values = [theta**m * mp.sqrt(theta) * f for m, f in enumerate(_boys(mmax, theta * T))]
    elif name == "erfc":
        values = _settled(lambda: _erfc_moments(mmax, rho, T, x))
    elif name == "yukawa":
        values = _settled(lambda: _yukawa_moments(mmax, rho, T, x)[1:])
    else:
        values = _settled(lambda: _slater_moments(mmax, rho, T, x))
    return [factor * v for v in values]


def checked_operator(operator):
    """`operator` as given; MD4Error if it cannot be used."""
    name, parameter = operator
    known = ("coulomb", "erf", "erfc", "yukawa", "slater", "gaussian", "gaussian_coulomb")
    if name not in known:
        raise UnsupportedError(f"operator {name!r} is not one of {', '.join(known)}.")
    if name != "coulomb" and (parameter is None or not parameter > 0):
        raise ArgumentError(f"operator {name!r} needs a positive parameter, not {parameter!r}.")
    return operator


# ---- angular parts ---------------------------------------------------------------------------------------------------


def monomials(l):
    """Cartesian exponents (x, y, z) of degree l in the order xx xy xz yy yz zz."""
    return [(x, y, l - x - y) for x in range(l, -1, -1) for y in range(l - x, -1, -1)]


@cache
def _harmonic(l, m):
    """r^l P_l^|m|(cos) cos(m phi) for m >= 0, sin(|m| phi) for m < 0, without phase, as {(x, y, z): Fraction}.

    From R_mm = (2m-1)!! (x + iy)^m by the recurrence of the Legendre functions,

        (l-m) R_lm = (2l-1) z R_(l-1)m - (l+m-1) r^2 R_(l-2)m .
    """
    k = abs(m)
    if l < k:
        return {}
    if l == k:
        odd = prod(range(2 * k - 1, 0, -2))
        return {(k - n, n, 0): Fraction(odd * comb(k, n) * (-1) ** (n // 2)) for n in range(m < 0, k + 1, 2)}
    total = {}
    squares = [(_harmonic(l - 2, m), axis, 1 - l - k) for axis in ((2, 0, 0), (0, 2, 0), (0, 0, 2))]
    for polynomial, factor, weight in [(_harmonic(l - 1, m), (0, 0, 1), 2 * l - 1), *squares]:
        for t, c in polynomial.items():
            raised = tuple(map(sum, zip(t, factor)))
            total[raised] = total.get(raised, 0) + Fraction(weight, l - k) * c
    return {t: c for t, c in total.items() if c}


def components(l, pure):
    """Components of a shell as a list of {(x, y, z): mpf}, in PySCF's order and normalisation."""
    if not pure and l >= 2:
        return [{t: mpf(1)} for t in monomials(l)]
    orders = (1, -1, 0) if l == 1 else range(-l, l + 1)
    return [{t: _norm(l, m) * c.numerator / c.denominator for t, c in _harmonic(l, m).items()} for m in orders]


def _norm(l, m):
    """Factor that gives `_harmonic` unit angular norm."""
    k = abs(m)
    square = Fraction((2 * l + 1) * factorial(l - k) * (2 if k else 1), factorial(l + k))
    return mp.sqrt(mpf(square.numerator) / square.denominator / (4 * mp.pi))


# ---- primitive quartets ----------------------------------------------------------------------------------------------


def _combine(*terms):
    """Sum of (factor, power, polynomial): factor u^power polynomial(u), as a list of coefficients without end zeros."""
    out = [mpf(0)] * max((power + len(poly) for _, power, poly in terms), default=0)
    for factor, power, poly in terms:
        if factor:
            for k, c in enumerate(poly):
                out[k + power] += factor * c
    while out and not out[-1]:
        out.pop()
    return out


class Axis:
    """The polynomials I(a, b, c, d)(u) along one axis of a primitive quartet, each computed once.

    `exponents` are four mpf; A, B, C and D are the coordinates of the four centres along this axis.
    """

    def __init__(self, exponents, A, B, C, D):
        a, b, c, d = exponents
        self.p, self.q = a + b, c + d
        self.AB, self.CD = A - B, C - D
        # differences first, so that what vanishes by symmetry is zero and not a rounding error
        self.PA, self.QC = -b / self.p * self.AB, -d / self.q * self.CD
        self.PQ = A - C + self.PA - self.QC
        self.memo = {(0, 0, 0, 0): [mpf(1)]}

    def __call__(self, a, b, c, d):
        """Horizontal recurrence  I(a, b+1) = I(a+1, b) + (A - B) I(a, b), and the like for d."""
        key = (a, b, c, d)
        if key not in self.memo:
            if d:
                terms = (1, 0, self(a, b, c + 1, d - 1)), (self.CD, 0, self(a, b, c, d - 1))
            elif b:
                terms = (1, 0, self(a + 1, b - 1, c, 0)), (self.AB, 0, self(a, b - 1, c, 0))
            else:
                terms = self.vertical(a, c)
            self.memo[key] = _combine(*terms)
        return self.memo[key]

    def vertical(self, n, m):
        """Terms of I(n, m) = I(n, 0, m, 0); with k the reduced exponent over p (over q when n = 0),

        I(n+1, m) = (PA - k PQ u) I(n, m) + n/2p (1 - k u) I(n-1, m) + m/2(p+q) u I(n, m-1) .
        """
        p, q, s = self.p, self.q, self.p + self.q
        if n == 0:
            k, one, two = p / s, self(0, 0, m - 1, 0), self(0, 0, m - 2, 0) if m > 1 else []
            half = (m - 1) / (2 * q)
            return (self.QC, 0, one), (k * self.PQ, 1, one), (half, 0, two), (-k * half, 1, two)
        k, one, two = q / s, self(n - 1, 0, m, 0), self(n - 2, 0, m, 0) if n > 1 else []
        half = (n - 1) / (2 * p)
        cross = (m / (2 * s), 1, self(n - 1, 0, m - 1, 0) if m else [])
        return (self.PA, 0, one), (-k * self.PQ, 1, one), (half, 0, two), (-k * half, 1, two), cross


class PrimitiveQuartet:
    """Integrals of Cartesian monomials over one primitive quartet, from the polynomials of the axes and the moments.

    `exponents` and `centres` are those of the four functions, as mpf; `degree` is the sum of their angular momenta.
    """

    def __init__(self, exponents, centres, degree, operator):
        a, b, c, d = exponents
        self.axes = [Axis(exponents, *coordinates) for coordinates in zip(*centres)]
        p, q = a + b, c + d
        rho = p * q / (p + q)
        ab2, cd2, pq2 = (mp.fsum(getattr(x, name) ** 2 for x in self.axes) for name in ("AB", "CD", "PQ"))
        scale = mp.exp(-a * b / p * ab2 - c * d / q * cd2) * mp.sqrt(mp.pi**2 / (p * q)) ** 3
        self.moments = [scale * v for v in moments(operator, degree, rho, rho * pq2)]
        self.folded, self.memo = {}, {}

    def fold(self, powers):
        """V_k = sum_m [I_z]_m M_(k+m): the moments with the z polynomial folded in, once for all x and y."""
        if powers not in self.folded:
            z = self.axes[2](*powers)
            count = len(self.moments) - len(z) + 1
            self.folded[powers] = [mp.fdot(z, self.moments[k : k + len(z)]) for k in range(count)] if z else []
        return self.folded[powers]

    def __call__(self, quartet):
        """Integral over the four monomials ((x, y, z), ..) of `quartet`."""
        if quartet not in self.memo:
            px, py, pz = zip(*quartet)
            x, y, v = self.axes[0](*px), self.axes[1](*py), self.fold(pz)
            inner = [mp.fdot(y, v[k : k + len(y)]) for k in range(len(x))] if y and v else []
            self.memo[quartet] = mp.fdot(x, inner) if inner else mpf(0)
        return self.memo[quartet]


# ---- contracted quartets ---------------------------------------------------------------------------------------------


class One:
    """The function 1 as a shell. Its centre does not matter, so it has that of the other function of its pair."""

    l, exponents, coefficients = 0, (0.0,), ((1.0,),)

    def __init__(self, other):
        self.centre = other.centre


def guard_digits(shells):
    """An upper bound on the digits that the recurrences and the sums over moments may lose.

    Each unit of angular momentum can turn a distance R into a width 1/sqrt(2p) by cancellation.
    """
    span = max(np.linalg.norm(np.subtract(s.centre, t.centre)) for s in shells for t in shells)
    p = 2 * max(np.max(s.exponents) for s in shells)
    return 20 + int(sum(s.l for s in shells) * (1 + log10(1 + span * (2 * p) ** 0.5)))


def expand(parts):
    """Product of four components as a list of (coefficient, four monomials)."""
    return [(prod(c for _, c in term), tuple(t for t, _ in term)) for term in product(*(p.items() for p in parts))]


def split_elements(shells, parts, elements):
    """Index tuples [contraction][component] as (contractions, components) pairs, checked against the block's shape."""
    shape = tuple(np.shape(s.coefficients)[1] * len(p) for s, p in zip(shells, parts))
    out = []
    for element in product(*map(range, shape)) if elements is None else elements:
        if len(element) != 4 or not all(0 <= i < n for i, n in zip(element, shape)):
            raise ArgumentError(f"element {tuple(element)} lies outside the block of shape {shape}.")
        out.append(tuple(zip(*(divmod(int(i), len(p)) for i, p in zip(element, parts)))))
    return shape, out


def eri(shells, pure=True, operator=("coulomb", None), elements=None, dps=40, exact=False):
    """Electron repulsion integrals (ab|cd), (ab|P) and (P|Q) in high precision.

    Parameters
    ----------
    shells : sequence of four
        Objects like `md4.shells.shell.Shell`: ``l``, ``exponents`` (nprim,), ``coefficients`` (nprim, nctr) of
        unnormalised radial primitives, ``centre`` (3,) in Bohr. None stands for the function 1: (a, b, P, None) gives
        (ab|P), and (P, None, Q, None) gives (P|Q).
    pure : bool
        Real solid harmonics, or Cartesians in libcint's normalisation.
    operator : tuple (str, float or None)
        ("coulomb", None), ("erf", omega), ("erfc", omega), ("yukawa", zeta), ("slater", zeta), ("gaussian", omega),
        ("gaussian_coulomb", omega).
    elements : sequence of (a, b, c, d), optional
        The elements to compute; the order of each index is [contraction][component]. The default is all elements.
    dps : int
        Number of correct digits, at least relative to the block's largest element.
    exact : bool
        Whether to return mpmath numbers (dtype object) of `dps` digits, instead of doubles.

    Returns
    -------
    ndarray, shape (na, nb, nc, nd), or (len(elements),)
    """
    checked_operator(operator)
    shells = [One(shells[n ^ 1]) if s is None else s for n, s in enumerate(shells)]
    with mp.workdps(dps + guard_digits(shells)):
        parts = [[{(0, 0, 0): mpf(1)}] if isinstance(s, One) else components(s.l, pure) for s in shells]
        shape, wanted = split_elements(shells, parts, elements)
        values = _contracted(shells, parts, operator, wanted)
    with mp.workdps(dps):
        values = [+v for v in values]
    out = np.array(values, dtype=object) if exact else np.array([float(v) for v in values])
    return out.reshape(shape) if elements is None else out


def _contracted(shells, parts, operator, wanted):
    """Values of `wanted` (contractions, components) pairs, summed over primitive quartets."""
    centres = [[mpf(float(x)) for x in s.centre] for s in shells]
    angular = {comps: expand([p[i] for p, i in zip(parts, comps)]) for _, comps in wanted}
    totals = [mpf(0)] * len(wanted)
    for primitives in product(*(range(len(s.exponents)) for s in shells)):
        exponents = [mpf(float(s.exponents[k])) for s, k in zip(shells, primitives)]
        quartet = PrimitiveQuartet(exponents, centres, sum(s.l for s in shells), operator)
        values = {comps: mp.fsum(c * quartet(t) for c, t in terms) for comps, terms in angular.items()}
        for n, (contractions, comps) in enumerate(wanted):
            factors = (s.coefficients[k][c] for s, k, c in zip(shells, primitives, contractions))
            totals[n] += mp.fprod(mpf(float(f)) for f in factors) * values[comps]
    return totals
