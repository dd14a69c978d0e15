"""Blocks over three and two centres: every class, operator and list, against libcint and the oracle."""

from dataclasses import dataclass
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from molecules import CENTRES, LMAX, component_rotation, host, molecule, relative_error
from pyscf import gto

import md4
from md4.engine import Engine
from md4.errors import ArgumentError, UnsupportedError
from md4.method.operators import OPERATORS, Operator
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.validation import oracle as reference
from md4.validation.arbiter import as_quartet
from md4.validation.libcint import FLOOR, class_label, sides

COULOMB = Operator.coulomb()
TOLERANCE = 1e-12  # of a block's largest element; rounding sets a floor of FLOOR times its Schwarz bound


@dataclass(frozen=True)
class Case:
    """One shell on each of two or three centres, (a|b) or (ab|c); a shell has `nprim` primitives."""

    ls: tuple
    nprim: int = 1
    nctr: int = 1
    cart: bool = False

    def mol(self):
        """A molecule with these shells; their exponents are of one size, so that blocks are not small."""
        rng = np.random.default_rng([5, *self.ls])
        basis = {}
        for n, l in enumerate(self.ls):
            exponents = np.geomspace(1.0, 5.0, self.nprim) * rng.uniform(0.7, 1.4)
            rows = np.column_stack([exponents, rng.uniform(0.2, 1.0, (self.nprim, self.nctr))])
            basis[f"H{n}"] = [[l, *rows.tolist()]]
        atoms = [(f"H{n}", r) for n, r in enumerate(CENTRES[: len(self.ls)])]
        return gto.M(atom=atoms, basis=basis, unit="Bohr", cart=self.cart, spin=None, verbose=0)

    def __str__(self):
        return f"{class_label(self.ls)}{' cart' if self.cart else ''}"


def block_of(basis, backend, operator=None):
    """The block of all shells of a basis, shape (na, nb, nc) or (na, nb); the other order of both sides is compared."""
    engine = Engine(basis, operator=operator, backend=backend)
    bra, ket = ([side] if len(side) == 2 else side for side in sides(list(range(len(basis)))))
    block = host(engine.compute(bra, ket))
    assert block.shape == (1, 1, *np.diff(basis.ao_loc))
    other = host(engine.compute(ket, bra))[0, 0]
    axes = (1, 2, 0) if len(basis) == 3 else (1, 0)
    np.testing.assert_allclose(other.transpose(axes), block[0, 0], rtol=0, atol=1e-13 * bound_of(basis))
    return block[0, 0]


def bound_of(basis):
    """The Schwarz bound of the block of all shells, for 1/r and coefficients that are all taken as positive."""
    positive = Basis([Shell(s.l, s.exponents, abs(s.coefficients), s.centre) for s in basis.shells], basis.pure)
    engine, bound = Engine(positive, backend="cpu"), 1.0
    for side in sides(list(range(len(basis)))):
        given = [side] if len(side) == 2 else side
        bound *= np.sqrt(abs(engine.compute(given, given)).max())
    return bound


def exact(basis, operator, elements):
    """The oracle's values of elements of the block of all shells."""
    shells, places = as_quartet(basis.shells, None), [as_quartet(e, 0) for e in elements]
    kind, parameter = operator.kind, operator.parameter or None
    return reference.eri(shells, basis.pure, (kind, parameter), places, dps=25)


def check_by_oracle(basis, backend, operator=COULOMB, count=4, elements=()):
    """Compares `elements`, some at random, and the largest one."""
    block = block_of(basis, backend, operator)
    rng = np.random.default_rng(block.size)
    places = {*rng.choice(block.size, min(block.size, count), replace=False).tolist(), int(abs(block).argmax())}
    chosen = [*elements, *(tuple(map(int, np.unravel_index(n, block.shape))) for n in places)]
    error = max(abs(exact(basis, operator, chosen) - [block[e] for e in chosen]))
    assert error <= TOLERANCE * abs(block).max() + FLOOR * scale_of(operator) * bound_of(basis)


def scale_of(operator):
    """The largest g(r) r of an operator that is not below 1/r."""
    size = operator.parameter or 1.0
    return max(1.0, {"slater": 1 / size, "gaussian": size**-0.5}.get(operator.kind, 1.0))


def check_by_libcint(case, backend):
    """Where md4 and libcint differ, the oracle decides on the elements that differ most."""
    mol = case.mol()
    name = {2: "int2c2e", 3: "int3c2e"}[len(case.ls)]
    theirs = mol.intor_by_shell(f"{name}_{'cart' if case.cart else 'sph'}", range(len(case.ls)))
    basis = Basis.from_mol(mol)
    ours = block_of(basis, backend)
    difference = abs(ours - theirs)
    if not difference.max() <= TOLERANCE * abs(theirs).max():
        worst = np.argsort(-difference, axis=None)[:2]
        check_by_oracle(basis, backend, elements=[np.unravel_index(n, ours.shape) for n in worst])


# classes --------------------------------------------------------------------------------------------------------------


def all_classes():
    """Every (la lb|lc) with la >= lb, and every (la|lb), up to i."""
    pairs = [(a, b) for b, a in combinations_with_replacement(range(LMAX + 1), 2)]
    return [*((*pair, l) for pair, l in product(pairs, range(LMAX + 1))), *pairs]


SOME = [(0, 0, 0), (1, 0, 1), (0, 1, 2), (2, 2, 0), (0, 3, 1), (2, 1, 4), (3, 3, 3), (0, 0, 6), (1, 4, 5), (5, 2, 2),
        (6, 0, 6), (6, 6, 6), (0, 0), (1, 0), (2, 3), (4, 4), (6, 1), (5, 6)]  # fmt: skip


@pytest.mark.parametrize("cart", [False, True])
@pytest.mark.parametrize("ls", SOME, ids=class_label)
def test_classes(backend, ls, cart):
    check_by_libcint(Case(ls, nprim=2 if sum(ls) < 10 else 1, cart=cart), backend)


@pytest.mark.slow
@pytest.mark.parametrize("cart", [False, True])
def test_all_classes(backend, cart):
    for ls in all_classes():
        check_by_libcint(Case(ls, cart=cart), backend)
        check_by_libcint(Case(ls, nprim=2, nctr=2, cart=cart), backend)


@pytest.mark.parametrize(
    "ls", [(1, 0, 7), (3, 2, 7), (6, 6, 7), (2, 2, 8), (1, 1, 9), (4, 3, 10), (7, 7), (8, 2), (9, 6), (10, 10)],
    ids=class_label,
)  # fmt: skip
@pytest.mark.parametrize("cart", [False, True])
def test_auxiliary_functions_of_high_l(backend, ls, cart):
    """k functions, and l = 8 to 10."""
    check_by_oracle(Basis.from_mol(Case(ls, cart=cart).mol()), backend)


@pytest.mark.slow
@pytest.mark.parametrize("l", range(7, 11))
def test_all_classes_of_high_l(backend, l):
    for other in [*((a, b) for b, a in combinations_with_replacement(range(LMAX + 1), 2)), *((m,) for m in range(11))]:
        check_by_oracle(Basis.from_mol(Case((*other, l)).mol()), backend, count=2)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("ls", [(0, 0, 0), (2, 1, 3), (1, 0, 8), (1, 1), (4, 2)], ids=class_label)
def test_operators(backend, kind, ls):
    operator = COULOMB if kind == "coulomb" else Operator(kind, 0.7)
    check_by_oracle(Basis.from_mol(Case(ls, nprim=2).mol()), backend, operator)


# shells of all kinds --------------------------------------------------------------------------------------------------


@st.composite
def any_basis(draw, most=4):
    """Two or three shells of any exponents from 1e-4 to 1e8, contractions with cancellation.

    A centre is where the one before is, as far away as the steepest function there reaches, or anywhere.
    """
    shells, centres, reach = [], [np.zeros(3)], 1.0
    coordinate = st.integers(-2000, 2000).map(lambda n: n / 1000)
    for _ in range(draw(st.integers(2, 3))):
        nprim, nctr, l = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, most))
        exponents = [10 ** (n / 100) for n in draw(st.lists(st.integers(-400, 800), min_size=nprim, max_size=nprim))]
        given = st.sampled_from([1.0, -0.4, 0.0, 30.0, 1e-3])
        rows = [[draw(given) for _ in range(nctr - 1)] + [1.0] for _ in range(nprim)]
        rows[0] = [row or 1.0 for row in rows[0]]
        distance = draw(st.sampled_from([reach, reach, 1.0, 0.0]))
        centres.append(centres[-1] + distance * np.array([draw(coordinate) for _ in range(3)]))
        reach = max(exponents) ** -0.5
        shells.append((l, exponents, rows, centres[-1]))
    columns = zip(*shells)
    try:
        return Basis.from_arrays(*columns, pure=draw(st.booleans()))
    except md4.BasisError:  # a function of norm 0
        return Basis.from_arrays([0, 1], [[1e8], [1e-4]], [[1.0], [1.0]], [centres[0], centres[-1]])


def check_any(basis):
    check_by_oracle(basis, "cpu", count=2)


@given(basis=any_basis())
def test_any_exponents(basis):
    check_any(basis)


@pytest.mark.slow
@settings(max_examples=300)
@given(basis=any_basis(most=6))
def test_any_exponents_at_length(basis):
    check_any(basis)


@pytest.mark.parametrize(("steep", "diffuse"), [((0, 1), (2,)), ((2,), (0, 1)), ((1,), (0, 2)), ((0, 1, 2), ())])
@pytest.mark.parametrize("l", [0, 2, 7])
def test_steep_beside_diffuse(backend, steep, diffuse, l):
    exponents = [[1e8] if n in steep else [1e-4] if n in diffuse else [1.0] for n in range(3)]
    centres = [[0, 0, 0], [0, 0, 1e-4], [0.5, 0.3, -0.7]]
    check_by_oracle(Basis.from_arrays([2, 1, l], exponents, [[1.0]] * 3, centres), backend)


def test_far_apart(backend):
    """(ss|d) falls as 1/R^3."""
    for distance in (10.0, 1e3, 1e5):
        centres = [[0, 0, 0], [0, 0.4, 0.5], [0.3 * distance, 0, 0.8 * distance]]
        check_by_oracle(Basis.from_arrays([1, 0, 2], [[0.9], [1.3], [0.7]], [[1.0]] * 3, centres), backend)


@pytest.mark.parametrize("ls", [(1, 1, 2), (2, 3, 4), (3, 2), (1, 0, 7)], ids=class_label)
def test_translation(backend, ls):
    basis = Basis.from_mol(Case(ls).mol())
    shift = np.array([3.0, -7.0, 5.0])
    moved = Basis([Shell(s.l, s.exponents, s.coefficients, s.centre + shift) for s in basis.shells])
    assert relative_error(block_of(moved, backend), block_of(basis, backend)) < 1e-11


@pytest.mark.parametrize("cart", [False, True])
@pytest.mark.parametrize("ls", [(1, 1, 2), (2, 3, 4), (3, 2), (1, 2, 7)], ids=class_label)
def test_rotation(backend, ls, cart):
    """All centres rotated, and the components turned back."""
    basis = Basis.from_mol(Case(ls, cart=cart).mol())
    turn, _ = np.linalg.qr(np.random.default_rng(5).normal(size=(3, 3)))
    turned = [Shell(s.l, s.exponents, s.coefficients, turn @ s.centre) for s in basis.shells]
    block = block_of(Basis(turned, basis.pure), backend)
    for n, l in enumerate(ls):
        rotation = component_rotation(l, basis.pure, turn)
        block = np.moveaxis(np.tensordot(rotation, block, axes=(0, n)), 0, n)
    assert relative_error(block, block_of(basis, backend)) < 1e-12


# lists of shells ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowd():
    """s, p and d shells, in this order, on each of four centres: 1 to 7 primitives, one or two functions."""
    rng, basis = np.random.default_rng(3), {}
    for n in range(4):
        two = [[2, *([float(e), 0.4, 0.9 - e / 9] for e in rng.uniform(0.3, 4, n + 1))]]
        many = [0, *([float(e), 0.5] for e in rng.uniform(0.3, 40, 2 * n + 1))]
        basis[f"H{n}"] = [[1, [0.8 + 0.1 * n, 1.0]], *two, many]
    return molecule([(f"H{n}", r) for n, r in enumerate(2 * CENTRES)], basis, unit="Bohr")


def part_of(tensor, mol, shells):
    """The block of some shells of an AO tensor."""
    return tensor[np.ix_(*(range(mol.ao_loc[n], mol.ao_loc[n + 1]) for n in shells))]


@pytest.mark.parametrize("ls", [(2, 1, 0), (0, 2, 2), (1, 1, 2), (2, 2), (0, 1)], ids=class_label)
@pytest.mark.parametrize("chunk", [None, 1, 20_000])
def test_lists(backend, crowd, ls, chunk, monkeypatch):
    """All pairs with all single shells, in chunks of all sizes, and in the other order."""
    if chunk:
        monkeypatch.setattr("md4.gpu.backend.CHUNK_BYTES" if backend == "cuda" else "md4.cpu.backend.OUT", chunk)
    groups = [[n for n in range(crowd.nbas) if crowd.bas_angular(n) == l] for l in ls]
    bra, ket = (list(product(*side)) if len(side) == 2 else side[0] for side in sides(groups))
    tensor = crowd.intor("int3c2e" if len(ls) == 3 else "int2c2e")
    theirs = np.array([[part_of(tensor, crowd, (*np.ravel(ij), k)) for k in ket] for ij in bra])
    engine = Engine(Basis.from_mol(crowd), backend=backend)
    ours, other = host(engine.compute(bra, ket)), host(engine.compute(ket, bra))
    assert ours.shape == theirs.shape
    assert relative_error(ours, theirs) < TOLERANCE
    axes = (1, 0, 3, 4, 2) if len(ls) == 3 else (1, 0, 3, 2)
    assert relative_error(other.transpose(axes), theirs) < TOLERANCE


def test_out(crowd):
    engine = Engine(Basis.from_mol(crowd), backend="cpu")
    out = np.full((2, 4, 3, 1, 10), np.nan)
    assert engine.compute([[1, 0], [4, 3]], [2, 5, 8, 11], out=out) is out
    np.testing.assert_array_equal(out, engine.compute([[1, 0], [4, 3]], [2, 5, 8, 11]))
    with pytest.raises(ArgumentError, match=r"out must be .* of shape \(2, 1, 3, 1, 10\)"):
        engine.compute([[1, 0], [4, 3]], [2], out=out)


def test_any_order_of_shells(backend, crowd):
    """Shells may come in any order and more than once."""
    engine, order = Engine(Basis.from_mol(crowd), backend=backend), [11, 2, 2, 8, 2]
    ours = host(engine.compute([[1, 0]], order))
    np.testing.assert_allclose(ours, host(engine.compute([[1, 0]], [2, 5, 8, 11]))[:, [3, 0, 0, 2, 0]], atol=1e-14)


@pytest.mark.parametrize(
    ("bra", "ket", "message"),
    [
        ([[0, 2]], [0, 1], r"ket pair list mixes classes"),
        ([0, 1], [0], r"bra pair list mixes classes"),
        ([[0, 2]], [12], r"ket pair 0 names shell 12, but the basis has shells 0 to 11"),
        ([-1], [0], r"bra pair 0 names shell -1"),
        ([[0, 2]], [], r"n >= 1"),
        ([[0, 2]], [0.0], r"integer type"),
        ([[0, 2]], [[0]], r"shape \(n, 2\)"),
        ([[0, 2]], 0, r"shape"),
    ],
)
def test_wrong_lists(crowd, bra, ket, message):
    with pytest.raises(ArgumentError, match=message):
        Engine(Basis.from_mol(crowd), backend="cpu").compute(bra, ket)


def test_the_unit_function_is_not_for_lists(crowd):
    basis = Basis.joined([Basis.from_mol(crowd)])
    with pytest.raises(ArgumentError, match="unit function"):
        Engine(basis, backend="cpu").compute([[0, 2]], [basis.unit])


@pytest.mark.parametrize(("ls", "order"), [((16, 8, 9), 33), ((17, 16), 33), ((16, 0, 16), 32), ((16, 16), 32)])
def test_limit_of_angular_momentum(ls, order):
    basis = Basis.from_arrays(ls, [[1.0]] * len(ls), [[1.0]] * len(ls), CENTRES[: len(ls)])
    bra, ket = ([side] if len(side) == 2 else side for side in sides(list(range(len(ls)))))
    engine = Engine(basis, backend="cpu")
    if order > 32:
        with pytest.raises(UnsupportedError, match=f"add up to L = {order}, beyond the limit of 32"):
            engine.compute(bra, ket)
    else:
        assert np.isfinite(engine.compute(bra, ket)).all()
