"""The oracle against libcint, against plain quadrature, and against identities that integrals obey."""

import json
from dataclasses import replace

import numpy as np
import pytest
from mpmath import mp, mpf
from places import DATA
from pyscf import gto

from md4.errors import ArgumentError, UnsupportedError
from md4.shells.shell import Shell
from md4.validation import oracle as reference

OPERATORS = (("coulomb", None), ("erf", 0.3), ("erfc", 0.3), ("yukawa", 1.2), ("slater", 1.2), ("gaussian", 0.7),
             ("gaussian_coulomb", 0.7))  # fmt: skip
KERNELS = {
    "coulomb": lambda r, x: 1 / r,
    "erf": lambda r, x: mp.erf(x * r) / r,
    "erfc": lambda r, x: mp.erfc(x * r) / r,
    "yukawa": lambda r, x: mp.exp(-x * r) / r,
    "slater": lambda r, x: mp.exp(-x * r),
    "gaussian": lambda r, x: mp.exp(-x * r * r),
    "gaussian_coulomb": lambda r, x: mp.exp(-x * r * r) / r,
}
by_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o[0])


@pytest.fixture(autouse=True)
def many_digits():
    """Comparisons must not round what they compare."""
    with mp.workdps(150):
        yield


def random_shells(ls, seed=0, nprim=1, nctr=1):
    rng = np.random.default_rng(seed)
    return [Shell(l, rng.uniform(0.3, 3, nprim), rng.uniform(0.2, 1, (nprim, nctr)), rng.uniform(-1, 1, 3)) for l in ls]


def molecule(ls, cart, seed=0, nprim=1, nctr=1):
    """Four hydrogens at random places with one shell each, and these shells as libcint holds them."""
    shells = random_shells(ls, seed, nprim, nctr)
    names = [f"H{i}" for i in range(4)]
    basis = {n: [[s.l, *np.column_stack([s.exponents, s.coefficients]).tolist()]] for n, s in zip(names, shells)}
    atoms = [(n, s.centre) for n, s in zip(names, shells)]
    mol = gto.M(atom=atoms, basis=basis, unit="Bohr", cart=cart, verbose=0)
    kept = [Shell(mol.bas_angular(i), mol.bas_exp(i), mol._libcint_ctr_coeff(i), mol.bas_coord(i)) for i in range(4)]
    return mol, kept


def deviation_from_libcint(ls, cart, omega=0.0, count=None, **kwargs):
    """Largest deviation over `count` elements of the block (all by default), relative to the block's largest."""
    mol, shells = molecule(ls, cart, **kwargs)
    with mol.with_range_coulomb(omega):
        block = mol.intor_by_shell("int2e_cart" if cart else "int2e_sph", (0, 1, 2, 3))
    operator = ("coulomb", None) if omega == 0 else ("erf" if omega > 0 else "erfc", abs(omega))
    rng = np.random.default_rng(7)
    elements = list(np.ndindex(block.shape))
    if count:
        elements = [elements[i] for i in rng.choice(len(elements), count, replace=False)]
        elements.append(np.unravel_index(np.argmax(abs(block)), block.shape))
    values = reference.eri(shells, not cart, operator, elements)
    return np.max(np.abs(values - [block[tuple(e)] for e in elements])) / np.max(np.abs(block))


@pytest.mark.parametrize("cart", [False, True], ids=["pure", "cartesian"])
@pytest.mark.parametrize(
    ("ls", "count"),
    [((0, 0, 0, 0), None), ((1, 0, 0, 1), None), ((0, 1, 2, 1), None), ((3, 1, 2, 0), 60), ((2, 2, 2, 2), 60),
     ((3, 3, 3, 3), 15), ((0, 4, 1, 3), 30), ((4, 4, 4, 4), 8)],
)  # fmt: skip
def test_libcint(ls, count, cart):
    assert deviation_from_libcint(ls, cart, count=count) < 1e-13


@pytest.mark.parametrize("cart", [False, True], ids=["pure", "cartesian"])
@pytest.mark.parametrize("omega", [0.0, 2.5])
@pytest.mark.parametrize("ls", [(0, 0, 0), (1, 0, 2), (2, 3, 1), (4, 2, 4), (5, 6, 3), (6, 6, 6)])
def test_libcint_of_three_and_two_centres(ls, omega, cart):
    """(ij|P) and (j|P) to i functions; libcint's erf is good to 1e-10 there, and that of Coulomb to 1e-12."""
    mol, (i, j, P, _) = molecule((*ls, 0), cart, nprim=2 if sum(ls) < 8 else 1)
    operator = ("erf", omega) if omega else ("coulomb", None)
    kind = "cart" if cart else "sph"
    for name, numbers, shells in (("int3c2e", (0, 1, 2), (i, j, P, None)), ("int2c2e", (1, 2), (j, None, P, None))):
        with mol.with_range_coulomb(omega):
            block = mol.intor_by_shell(f"{name}_{kind}", numbers)
        places = np.random.default_rng(8).choice(block.size, min(block.size, 12), replace=False)
        elements = [np.unravel_index(n, block.shape) for n in (*places, np.argmax(abs(block)))]
        full = [(*e, 0) if len(e) == 3 else (e[0], 0, e[1], 0) for e in elements]
        values = reference.eri(shells, not cart, operator, full)
        assert abs(values - [block[e] for e in elements]).max() <= (1e-10 if omega else 1e-12) * abs(block).max()


@pytest.mark.parametrize("cart", [False, True], ids=["pure", "cartesian"])
@pytest.mark.parametrize("omega", [0.3, -0.3])
@pytest.mark.parametrize(("ls", "count"), [((0, 0, 0, 0), None), ((1, 2, 0, 1), None), ((3, 2, 2, 3), 15)])
def test_libcint_range_separated(ls, count, omega, cart):
    """libcint's own short-range roots are good to 1e-11 or so; that erf + erfc = 1 is tested below to 36 digits."""
    assert deviation_from_libcint(ls, cart, omega, count) < (1e-13 if omega > 0 else 1e-10)


@pytest.mark.parametrize("cart", [False, True], ids=["pure", "cartesian"])
def test_libcint_general_contraction(cart):
    assert deviation_from_libcint((1, 0, 2, 0), cart, nprim=2, nctr=2) < 1e-13


@pytest.mark.parametrize("l", range(6))
def test_pure_components_are_libcints(l):
    expected = gto.cart2sph(l, normalized="sp")
    scale = {0: np.sqrt(4 * np.pi), 1: np.sqrt(4 * np.pi / 3)}.get(l, 1)
    parts = reference.components(l, True)
    found = np.array([[float(p.get(t, 0)) for p in parts] for t in reference.monomials(l)])
    assert np.allclose(found * scale, expected, rtol=0, atol=1e-14 * np.abs(expected).max())


@pytest.mark.parametrize("m", [0, 1, 5, 28])
@pytest.mark.parametrize("T", ["0", "1e-30", "0.3", "12.5", "99.9", "100.1", "1e4"])
def test_boys_is_its_integral(m, T):
    """Divided by itself beforehand, since `mp.quad` aims at an absolute error."""
    with mp.workdps(40):
        T = mpf(T)
        value = reference.boys(m, T)
        cuts = [0, *(x for x in (k / mp.sqrt(T + 1) for k in (3, 5, 7, 9, 12, 16)) if x < 1), 1]
        assert abs(mp.quad(lambda t: t ** (2 * m) * mp.exp(-T * t * t) / value, cuts) - 1) < mpf("1e-30")


def moment_integrand(operator, rho, T, m):
    """Integrand and end points of a moment, written down from the superposition of Gaussians exp(-s^2 r12^2)."""
    name, x = operator[0], mpf(operator[1] or 1)
    edge = x / mp.sqrt(rho + x * x)

    def integrand(t):
        inverse = (1 - t * t) / (rho * t * t)
        weight = {"yukawa": 1, "slater": x * inverse / 2}.get(name)
        screening = 1 if weight is None else weight * mp.exp(-x * x / 4 * inverse)
        return 2 * mp.sqrt(rho / mp.pi) * screening * t ** (2 * m) * mp.exp(-T * t * t)

    ends = {"erf": (0, edge), "erfc": (edge, 1)}.get(name, (0, 1))
    return integrand, [ends[0] + (ends[1] - ends[0]) * mpf(k) / 4 for k in range(5)]


@pytest.mark.parametrize("operator", OPERATORS[:5], ids=lambda o: o[0])
@pytest.mark.parametrize(("rho", "T"), [("0.7", "0"), ("2.5", "3.1"), ("0.2", "40")])
def test_moments_are_their_integrals(operator, rho, T):
    with mp.workdps(30):
        rho, T = mpf(rho), mpf(T)
        moments = reference.moments(operator, 28, rho, T)
        for m in (0, 3, 28):
            integrand, cuts = moment_integrand(operator, rho, T, m)
            assert abs(mp.quad(lambda t, f=integrand, v=moments[m]: f(t) / v, cuts) - 1) < mpf("1e-24")


@by_operator
@pytest.mark.parametrize(("rho", "T"), [("1e-3", "0"), ("1e5", "1e9"), ("3e4", "1e-12"), ("0.4", "500")])
def test_moments_keep_their_digits(operator, rho, T):
    few, many = [], []
    for dps, out in ((40, few), (90, many)):
        with mp.workdps(dps):
            out.extend(reference.moments(operator, 28, mpf(rho), mpf(T)))
    assert all(abs(a - b) <= mpf("1e-36") * abs(b) for a, b in zip(few, many))


@by_operator
@pytest.mark.parametrize("ones", [(), (3,), (1, 3)], ids=["(ss|ss)", "(ss|s)", "(s|s)"])
def test_s_functions_give_a_radial_integral(operator, ones):
    """(ss|ss) = S_ab S_cd sqrt(rho/pi)/R int f(r) r [exp(-rho (r-R)^2) - exp(-rho (r+R)^2)] dr, from the kernel.

    Of three and of two functions it is the same with exponents of 0.
    """
    shells = random_shells((0, 0, 0, 0), seed=3)
    a, b, c, d = (mpf(0 if n in ones else s.exponents[0]) for n, s in enumerate(shells))
    A, B, C, D = (mp.matrix(s.centre.tolist()) for s in shells)
    with mp.workdps(30):
        p, q = a + b, c + d
        rho, R = p * q / (p + q), mp.norm((a * A + b * B) / p - (c * C + d * D) / q)
        overlaps = mp.exp(-a * b / p * mp.norm(A - B) ** 2 - c * d / q * mp.norm(C - D) ** 2)
        overlaps *= (mp.pi**2 / p / q) ** 1.5
        kernel = KERNELS[operator[0]]
        integral = mp.quad(
            lambda r: kernel(r, operator[1]) * r * (mp.exp(-rho * (r - R) ** 2) - mp.exp(-rho * (r + R) ** 2)),
            [0, R, R + 2, R + 5, R + 20],
        )
        factors = (s.coefficients[0, 0] / mp.sqrt(4 * mp.pi) for n, s in enumerate(shells) if n not in ones)
        expected = mp.fprod(factors) * overlaps * mp.sqrt(rho / mp.pi) / R * integral
    shells = [None if n in ones else s for n, s in enumerate(shells)]
    value = reference.eri(shells, True, operator, exact=True)[0, 0, 0, 0]
    assert abs(value / expected - 1) < mpf("1e-22")


def test_gaussian_geminal_is_a_product_of_one_dimensional_integrals():
    """int exp(-omega r12^2) over monomials, each axis by its own two-dimensional quadrature."""
    shells = random_shells((2, 1, 1, 0), seed=5)
    omega, monomials = 0.7, ((1, 1, 0), (0, 1, 0), (1, 0, 0), (0, 0, 0))
    x, w = np.polynomial.hermite.hermgauss(60)
    value = 1.0
    for axis in range(3):
        e, R = [s.exponents[0] for s in shells], [s.centre[axis] for s in shells]
        hessian = np.array([[e[0] + e[1] + omega, -omega], [-omega, e[2] + e[3] + omega]])
        inverse = np.linalg.inv(np.linalg.cholesky(hessian))
        centre = np.linalg.solve(hessian, [e[0] * R[0] + e[1] * R[1], e[2] * R[2] + e[3] * R[3]])
        points = centre + np.stack(np.meshgrid(x, x), axis=-1) @ inverse
        r = points[..., [0, 0, 1, 1]] - R
        least = centre[[0, 0, 1, 1]] - R
        height = np.exp(-np.dot(e, least**2) - omega * (centre[0] - centre[1]) ** 2)
        factor = np.prod([r[..., i] ** monomials[i][axis] for i in range(4)], axis=0)
        value *= height * np.linalg.det(inverse) * np.einsum("i,j,ij", w, w, factor)
    value *= np.prod([s.coefficients[0, 0] for s in shells]) * 3 / (4 * np.pi) / np.sqrt(4 * np.pi)
    assert reference.eri(shells, False, ("gaussian", omega), [(1, 1, 0, 0)])[0] == pytest.approx(value, rel=1e-12)


@by_operator
def test_permutation_symmetry(operator):
    shells = random_shells((5, 2, 3, 1), seed=1)
    element, value = (2, 1, 4, 0), None
    for order in ((0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2), (3, 2, 1, 0), (2, 3, 0, 1)):
        permuted = reference.eri(
            [shells[i] for i in order], True, operator, [tuple(element[i] for i in order)], exact=True
        )[0]
        value = permuted if value is None else value
        assert abs(permuted / value - 1) < mpf("1e-38")


@by_operator
def test_p_is_the_derivative_of_s(operator):
    """d/dA_x (ss|ss) = 2a (p_x s|ss), up to the angular norms 1/sqrt(4 pi) and sqrt(3/4 pi)."""
    shells = random_shells((0, 0, 0, 0), seed=2)
    h = 2.0**-20

    def at(shift):
        moved = replace(shells[0], centre=shells[0].centre + np.array([shift, 0, 0]))
        return reference.eri([moved, *shells[1:]], True, operator, dps=50, exact=True)[0, 0, 0, 0]

    shells[0] = replace(shells[0], centre=np.round(shells[0].centre * 2**20) / 2**20)  # so that shifts are exact
    slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * mpf(h))
    p = reference.eri([replace(shells[0], l=1), *shells[1:]], True, operator, exact=True)[0, 0, 0, 0]
    assert abs(2 * shells[0].exponents[0] * p / mp.sqrt(3) / slope - 1) < mpf("1e-14")


@by_operator
def test_one_is_the_limit_of_a_diffuse_function(operator):
    """An s function of exponent 1e-40 and value 1 in the place of 1, at another centre."""
    shells, where = random_shells((3, 2, 10), seed=9), np.array([0.3, -0.2, 0.5])
    diffuse = Shell(0, np.array([1e-40]), np.ones((1, 1)), where)
    elements = [(1, 2, 7, 0), (6, 0, 20, 0), (3, 3, 10, 0)]
    exact = reference.eri([*shells, None], True, operator, elements, exact=True)
    limit = reference.eri([*shells, diffuse], True, operator, elements, dps=60, exact=True) * mp.sqrt(4 * mp.pi)
    assert all(abs(x / y - 1) < mpf("1e-36") for x, y in zip(limit, exact))
    swapped = reference.eri([None, *shells[2::-1]], True, operator, [e[::-1] for e in elements], exact=True)
    assert all(abs(x / y - 1) < mpf("1e-38") for x, y in zip(swapped, exact))


def test_erf_and_erfc_add_up_to_coulomb():
    shells = random_shells((4, 2, 3, 1), seed=4)
    parts = [reference.eri(shells, True, op, [(1, 2, 3, 0)], exact=True)[0] for op in OPERATORS[:3]]
    assert abs((parts[1] + parts[2]) / parts[0] - 1) < mpf("1e-36")


@pytest.mark.parametrize("distance", [0.0, 1.0, 50.0])
def test_digits_hold_where_recurrences_cancel(distance):
    """Raising the precision changes nothing: tight on diffuse functions, far apart, high angular momenta."""
    rng = np.random.default_rng(6)
    exponents, sites = (1e5, 1e-3, 2e-3, 1e5), (0, 1, 0, 1)
    axis, one = np.array([0.6, 0.0, 0.8]), np.ones((1, 1))
    shells = [Shell(5, np.array([e]), one, distance * s * axis) for e, s in zip(exponents, sites)]
    elements = [tuple(int(i) for i in rng.integers(21, size=4)) for _ in range(6)] + [(0, 0, 0, 0)]
    few, many = (reference.eri(shells, False, elements=elements, dps=dps, exact=True) for dps in (40, 140))
    assert all(abs(a - b) <= mpf("1e-36") * abs(b) for a, b in zip(few, many) if abs(b) > mpf("1e-60"))


def test_refusals():
    shells = random_shells((0, 0, 0, 0))
    with pytest.raises(UnsupportedError, match="'dirac'"):
        reference.eri(shells, operator=("dirac", None))
    with pytest.raises(ArgumentError, match="positive parameter"):
        reference.eri(shells, operator=("erf", 0))
    with pytest.raises(ArgumentError, match="outside the block"):
        reference.eri(shells, elements=[(0, 0, 0, 1)])


def test_stored_values_are_reproduced():
    """A sample of reference.json: one cheap element from every fifth case."""
    cases = json.loads((DATA / "reference.json").read_text())
    for case in cases[::5]:
        if sum(s["l"] for s in case["shells"]) > 20 and case["pure"]:
            continue
        arrays = "exponents", "coefficients", "centre"
        shells = [Shell(s["l"], *(np.array(s[k]) for k in arrays)) for s in case["shells"]]
        element, stored = case["elements"][0], mpf(case["values"][0])
        value = reference.eri(shells, case["pure"], tuple(case["operator"]), [element], exact=True)[0]
        assert abs(value - stored) <= mpf("1e-23") * abs(stored) + mpf("1e-37") * mpf(case["scale"]), case["name"]
