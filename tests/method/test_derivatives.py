"""H of derivatives of shell pairs: as functions of space they are the derivatives of products of AOs."""

from itertools import product

import numpy as np
import pytest
from molecules import molecule
from numpy.polynomial.hermite import hermval

from md4.cpu.groups import Groups, functions_of, structure_of
from md4.cpu.h_matrices import make_h
from md4.method.angular import AXES, hermite_triples
from md4.method.derivatives import OF_A, OF_B, axis_derivatives, axis_of, make_h_derivatives
from md4.method.hermite import NOISE, component_table, e_coefficient, h_element
from md4.shells.basis import Basis
from md4.shells.shell_pairs import shell_pairs
from md4.support.memory import HostMemory

POINTS = np.random.default_rng(0).uniform(-1.5, 1.5, (40, 3))
# l of a and b, and their contracted functions
CLASSES = [(0, 0, 1, 1), (1, 0, 2, 1), (0, 2, 1, 2), (2, 1, 2, 2), (3, 2, 1, 1), (2, 4, 1, 1), (6, 5, 1, 1)]


def pair_of_atoms(la, lb, nctr_a, nctr_b, cart):
    """Two contracted shells, each on an atom of its own."""
    rng = np.random.default_rng([la, lb])

    def shell(l, nctr):
        return [[l, *([float(e), *rng.uniform(0.2, 1, nctr)] for e in rng.uniform(0.4, 2, 2))]]

    basis = {"H1": shell(la, nctr_a), "H2": shell(lb, nctr_b)}
    return molecule("H1 0.1 -0.2 0.3; H2 -0.4 0.5 0.2", basis, cart=cart)


def dense_h(pairs):
    """H of a list of pairs as (primitive pair, derivative, ab, p), with p those of `functions_of`."""
    sequence, rows, columns = structure_of(pairs)
    flat = make_h(pairs, Groups.of(pairs), HostMemory()).flat
    row = np.repeat(sequence[np.arange(len(rows) - 1) % len(sequence)], np.diff(rows))
    found = np.zeros((pairs.nprim, len(sequence), len(functions_of(pairs)[0])))
    found[:, row, columns] = flat
    return found.reshape(pairs.nprim, max(1, len(pairs.derivatives)), pairs.na * pairs.nb, -1)


def hermite_gaussians(pairs):
    """(d/dP)^p exp(-p |r - P|^2) at `POINTS`, shape (primitive pair, p, point)."""
    triples, data = functions_of(pairs)[1].reshape(-1, 3), pairs.primitives
    found = np.ones((pairs.nprim, len(triples), len(POINTS)))
    for k, (exponent, centre) in enumerate(zip(data.exponent, data.centre)):
        for axis in range(3):
            x = np.sqrt(exponent) * (POINTS[:, AXES[axis]] - centre[axis])
            for n, order in enumerate(triples[:, axis]):
                values = hermval(x, np.eye(int(order) + 1)[int(order)]) * np.exp(-(x**2))
                found[k, n] *= np.sqrt(exponent) ** int(order) * values
    return found


def in_space(pairs):
    """The functions of pairs at `POINTS`, shape (derivative, ab, point)."""
    return np.einsum("kdrp,kpn->drn", dense_h(pairs), hermite_gaussians(pairs))


def products(mol, basis, derivatives):
    """Products of AOs a and b, or their derivatives by the centres, shape (derivative, ab, point)."""
    suffix, (na, nb) = "cart" if mol.cart else "sph", np.diff(basis.ao_loc)
    values = mol.eval_gto(f"GTOval_{suffix}", POINTS)
    moved = -mol.eval_gto(f"GTOval_ip_{suffix}", POINTS)
    pairs = []
    for d in derivatives or (0,):
        a, b = values[:, :na], values[:, na:]
        if d in OF_A:
            a = moved[d - 1][:, :na]
        elif d in OF_B:
            b = moved[d - 4][:, na:]
        pairs.append(np.einsum("na,nb->abn", a, b).reshape(na * nb, -1))
    return np.array(pairs)


def assert_same(ours, theirs):
    assert ours.shape == theirs.shape
    assert abs(ours - theirs).max() < 1e-12 * abs(theirs).max()


@pytest.mark.parametrize("derivatives", [(), OF_A, OF_B, OF_A + OF_B, (5, 1)], ids=str)
@pytest.mark.parametrize("cart", [False, True], ids=["spherical", "Cartesian"])
@pytest.mark.parametrize("shells", CLASSES)
def test_derivatives_in_space(shells, cart, derivatives):
    mol = pair_of_atoms(*shells, cart)
    basis = Basis.from_mol(mol)
    pairs = shell_pairs(basis, [[0, 1]]).derived(derivatives)
    assert_same(in_space(pairs), products(mol, basis, derivatives))


@pytest.mark.parametrize("cart", [False, True], ids=["spherical", "Cartesian"])
@pytest.mark.parametrize("l, nctr", [(0, 2), (1, 1), (2, 2), (3, 1), (6, 1)])
def test_single_shells(l, nctr, cart):
    """Pairs with the unit function, which have one centre; a spherical one needs |p| = l + 1 only."""
    mol = pair_of_atoms(l, 0, nctr, 1, cart)
    basis = Basis.from_mol(mol)
    single = shell_pairs(basis.with_unit, [[0, basis.nshell]]).derived(OF_A)
    assert single.single
    moved = -mol.eval_gto("GTOval_ip_cart" if cart else "GTOval_ip_sph", POINTS)[..., : basis.ao_loc[1]]
    unit = basis.with_unit.shells[-1].coefficients.item() * 0.5 / np.sqrt(np.pi)
    assert_same(in_space(single), unit * moved.transpose(0, 2, 1))
    if not cart:
        assert (functions_of(single)[1].reshape(-1, 3).sum(axis=1) == l + 1).all()


@pytest.mark.parametrize("cart", [False, True], ids=["spherical", "Cartesian"])
@pytest.mark.parametrize("shells", CLASSES)
def test_both_centres_together(shells, cart):
    """H^A + H^B = H[p - 1_i]: a pair that is moved as a whole changes as its Hermite functions do."""
    pairs = shell_pairs(Basis.from_mol(pair_of_atoms(*shells, cart)), [[0, 1]])
    derived = pairs.derived(OF_A + OF_B)
    plain, both = dense_h(pairs)[:, 0], dense_h(derived)
    below = {tuple(p): n for n, p in enumerate(functions_of(pairs)[1].reshape(-1, 3).tolist())}
    triples = functions_of(derived)[1].reshape(-1, 3)
    for derivative in OF_A:
        lower = triples.copy()
        lower[:, axis_of(derivative)] -= 1
        want = np.zeros_like(both[:, 0])
        for n, p in enumerate(lower.tolist()):
            if tuple(p) in below:
                want[..., n] = plain[..., below[tuple(p)]]
        assert_same(both[:, derivative - 1] + both[:, derivative + 2], want)


def test_axes():
    """Numbers 1 to 3 and 4 to 6 are x, y and z, which Hermite triples have in the order z, y, x."""
    assert [AXES[axis_of(d)] for d in OF_A] == [AXES[axis_of(d)] for d in OF_B] == [0, 1, 2]


# the device function that makes all six where they are needed ---------------------------------------------------------

EVERY_CLASS = [(la, lb) for la in range(7) for lb in range(la + 1)]


class PlainH:
    """E of two primitives on the axes z, y and x, up to powers la and lb, and elements of H by `h_element`."""

    def __init__(self, la, lb, za, zb, a, b):
        self.l, self.lb, p, nt = la + lb, lb, za + zb, la + lb + 1
        self.overlap, self.nt, self.size = np.exp(-za * zb / p * np.sum((a - b) ** 2)), nt, (la + 1) * (lb + 1) * nt
        self.e, centre = np.zeros(3 * self.size), (za * a + zb * b) / p
        for axis, i, j, t in np.ndindex(3, la + 1, lb + 1, nt):
            place, x = axis * self.size, AXES[axis]
            self.e[place + (i * (lb + 1) + j) * nt + t] = e_coefficient(
                i, j, t, lb, nt, 0.5 / p, centre[x] - a[x], centre[x] - b[x], self.e, place
            )

    def element(self, row, p):
        """With the exponential; zero where there is no such Hermite function."""
        if min(p) < 0 or sum(p) > self.l:
            return 0.0
        return self.overlap * h_element(*row, *p, self.lb, self.nt, self.size, self.e)


def random_row(rng, la, lb, pure):
    """A component of a and one of b, as `h_element` takes them."""
    found = []
    for l in (la, lb):
        start, powers, weights = component_table(l, pure)
        n = rng.integers(len(start) - 1)
        found += [*start[n : n + 2].tolist(), powers, weights]
    return found


@pytest.mark.parametrize("pure", [True, False], ids=["spherical", "Cartesian"])
@pytest.mark.parametrize("la, lb", EVERY_CLASS)
def test_h_of_all_derivatives(la, lb, pure):
    """Elements beside differences of H, to which s H[p - 1_i] is added since Hermite functions move with P."""
    rng, count, step = np.random.default_rng([la, lb]), 0, 1e-3
    centres, exponents = rng.uniform(-1, 1, (2, 3)), rng.uniform(0.5, 2.0, 2)
    h_derivatives, more = make_h_derivatives(axis_derivatives, NOISE), PlainH(la + 1, lb + 1, *exponents, *centres)
    plain, triples, moved = PlainH(la, lb, *exponents, *centres), hermite_triples(la + lb + 1), {}
    for move in product(range(2), range(3), (-2, -1, 1, 2)):
        places = centres.copy()
        places[move[:2]] += step * move[2]
        moved[move] = PlainH(la, lb, *exponents, *places)
    for _ in range(30):
        row, p = random_row(rng, la, lb, pure), triples[rng.integers(len(triples))]
        found = h_derivatives(*row, *p, lb + 1, more.nt, more.size, more.e, *(2 * exponents))
        found = more.overlap * np.reshape(found, (2, 3))  # of A and B, along z, y and x
        for place, axis in enumerate(AXES):
            below = plain.element(row, p - np.eye(3, dtype=int)[place])
            assert abs(found[:, place].sum() - below) < 1e-12 * (abs(found[:, place]).max() + 1e-3)
            for centre in range(2):
                at = {n: moved[centre, axis, n].element(row, p) for n in (-2, -1, 1, 2)}
                slope = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
                want = slope + exponents[centre] / exponents.sum() * below
                assert abs(found[centre, place] - want) < 1e-8 * (abs(want) + 1.0)
                count += want != 0
    assert count > 10
