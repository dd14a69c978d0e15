"""J and K of planar molecules that lie askew: turned, they are those of the molecule as it is."""

import numpy as np
import pytest
from densities import BENZENE, HERMITICITY, random_densities
from emulator import running
from molecules import METHANE, WATER, joined, molecule

import md4
from md4.contract.frame import Frame
from md4.contract.ranks import Alone
from md4.cpu.sums import HostSums
from md4.gpu.sums import DeviceSums
from md4.method.mirror import mirror_axis
from md4.shells.basis import Basis

CARBON_DIOXIDE = "C 0 0 0; O 0 0 1.16; O 0 0 -1.16"
# By angles of no symmetry, about all three axes.
ROTATION = np.array([[0.36, 0.48, -0.8], [-0.8, 0.6, 0], [0.48, 0.64, 0.6]]) @ [
    [1, 0, 0],
    [0, 0.6, -0.8],
    [0, 0.8, 0.6],
]


def askew(atoms, basis, **options):
    """A molecule, turned; its coordinates are rounded by that."""
    mol = molecule(atoms, basis, **options)
    return mol.set_geom_(mol.atom_coords() @ ROTATION.T, unit="Bohr", inplace=False)


@pytest.fixture
def turning(monkeypatch):
    """Has the CPU turn planar molecules, which does not gain by that."""

    def turn(yes=True):
        monkeypatch.setattr(HostSums, "gains_by_plane", lambda self, basis: yes)

    return turn


def frame_of(basis, order=None):
    """The `Frame` of a basis on the CPU, by default with its AOs in their order."""
    order = np.arange(basis.nao) if order is None else order
    return Frame(basis, order, md4.Engine(basis, backend="cpu").backend, Alone())


def assert_same(found, expected):
    """To rounding, relative to the largest element."""
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.shape == theirs.shape
            assert mine.dtype == theirs.dtype
            assert abs(mine - theirs).max() <= 8e-15 * abs(theirs).max()


MOLECULES = {
    "water": askew(WATER, "cc-pvdz"),
    "Cartesian water": askew(WATER, {"O": "cc-pvtz", "H": "6-31g"}, cart=True),
    "carbon dioxide": askew(CARBON_DIOXIDE, {"C": "cc-pvtz", "O": "6-31g"}),
    "functions in another order": askew(WATER, joined("cc-pvdz", "OH")),
    "general contraction": askew("C 0 0 0; H 0 0.9 0.6; H 0 -0.9 0.6", {"C": "roosdz", "H": "sto-3g"}),
}


@pytest.mark.sample("water", "Cartesian water", "general contraction", "functions in another order")
@pytest.mark.parametrize("mol", MOLECULES.values(), ids=MOLECULES)
def test_as_without_turning(mol, turning):
    """All symmetries of D, J alone, K alone, complex densities, and other operators."""
    as_it_is = md4.JK(mol, backend="cpu")
    assert as_it_is._frame.rotation is None
    turning()
    jk = md4.JK(mol, backend="cpu")
    assert jk._frame.rotation is not None
    for hermi in HERMITICITY:
        dm = random_densities(mol, hermi, 2)
        for options in ({}, {"with_k": False}, {"with_j": False}, {"omega": 0.3}, {"omega": -0.3}):
            assert_same(jk.get_jk(dm, hermi, **options), as_it_is.get_jk(dm, hermi, **options))
    real, imaginary = random_densities(mol, 1)[0], random_densities(mol, 2, seed=1)[0]
    assert_same(jk.get_jk(real + 1j * imaginary), as_it_is.get_jk(real + 1j * imaginary))


def test_symmetric_matrices_stay_symmetric(turning):
    turning()
    mol = MOLECULES["water"]
    for hermi, sign in ((1, 1), (2, -1)):
        for matrix in md4.get_jk(mol, random_densities(mol, hermi)[0], hermi, backend="cpu"):
            np.testing.assert_array_equal(matrix, sign * matrix.T)


def test_what_the_user_sees_is_not_turned(turning):
    turning()
    mol = MOLECULES["water"]
    jk = md4.JK(mol, backend="cpu")
    np.testing.assert_array_equal(jk.basis.centres, Basis.from_mol(mol).centres)
    assert jk._frame.basis is jk.engine.bra_basis is jk.team.basis
    assert mirror_axis(jk.engine.bra_basis.centres) == 0
    np.testing.assert_array_equal(jk.basis.exponents, jk.engine.bra_basis.exponents)
    np.testing.assert_array_equal(jk.basis.coefficients, jk.engine.bra_basis.coefficients)


def test_what_is_kept_for_turning_counts(turning):
    turning()
    mol = MOLECULES["water"]
    jk = md4.JK(mol, backend="cpu", max_memory=100)
    jk.get_jk(random_densities(mol))
    left = jk.engine.backend.memory_left()
    del jk._frame._room
    assert jk.engine.backend.memory_left() - left == 2 * 8 * mol.nao**2


def test_updates_and_new_molecules(turning):
    """Planar, not planar, and planar again."""
    turning()
    jk = md4.JK(MOLECULES["water"], backend="cpu")
    for mol, planar in ((MOLECULES["water"], True), (askew(METHANE, "6-31g"), False), (MOLECULES["water"], True)):
        jk.reset(mol)
        assert (jk._frame.rotation is not None) == planar
        dm = random_densities(mol, 0)[0]
        for scale in (1.0, 1.001):
            found = jk.update(scale * dm, 0)
        turning(False)
        for mine, theirs in zip(found, md4.get_jk(mol, scale * dm, 0, backend="cpu")):
            assert abs(mine - theirs).max() <= 2e-14 * abs(theirs).max()
        turning()
    jk.reset()
    assert jk._frame.rotation is not None
    assert_same(jk.get_jk(dm, 0), md4.get_jk(mol, dm, 0, backend="cpu"))


@pytest.mark.parametrize(
    "mol, turned",
    [
        (molecule(WATER, "6-31g"), False),
        (molecule("O 0.3 -0.2 0.9", "6-31g"), False),
        (askew(METHANE, "6-31g"), False),
        (molecule("He 0 0 0; He 1e12 1e12 1e12", "sto-3g", unit="Bohr"), False),
        (molecule("O 0 0 1e-16; H 0.6 0.8 0; H -0.6 0.8 0", "6-31g", unit="Bohr"), True),
        (askew(BENZENE, "sto-3g"), True),
        (askew("N 0 0 0; N 0 0 1.1", "6-31g"), True),
    ],
    ids=["in a plane already", "an atom", "not planar", "too far apart", "rounded", "benzene", "two atoms"],
)
def test_who_is_turned(mol, turned, turning):
    turning()
    basis = Basis.from_mol(mol)
    frame, order = frame_of(basis), np.arange(basis.nao)[::-1]
    assert (frame.rotation is not None) == turned
    assert (frame.basis is basis) != turned
    assert (frame.sharpening < 1) == turned
    assert ("as it is" in str(frame.facts())) != turned
    turning(False)
    off = frame_of(basis, order)
    assert off.rotation is None
    dm = random_densities(mol)
    np.testing.assert_array_equal(off.densities(dm), dm[:, order[:, None], order])
    np.testing.assert_array_equal(off.sums(off.densities(dm)), dm)


@pytest.mark.parametrize("cart", [False, True])
def test_factors_of_turned_matrices(cart, turning):
    """Turned matrices whose elements are 1 and -1 give elements that are larger, but no larger than is allowed for."""
    turning()
    mol = askew(WATER, "cc-pvqz", cart=cart)
    frame = frame_of(Basis.from_mol(mol))
    matrix = np.zeros((1, mol.nao, mol.nao))
    for aos, turn in frame._turns:
        block, signs = aos[: len(turn)], np.sign(turn[abs(turn).sum(axis=1).argmax()])
        matrix[0, block[:, None], block] = np.outer(signs, signs)
    assert 2 < abs(frame.sums(matrix)).max() < 1 / frame.sharpening


@pytest.mark.parametrize("hermi", HERMITICITY)
def test_screening_keeps_its_promise(hermi, turning):
    """The error of an element stays below the tolerance times the quartets that it takes a part of."""
    turning()
    mol = askew("\n".join(f"H 0 {k % 2} {1.8 * k}" for k in range(8)), "6-31g**")
    decay = np.exp(-0.3 * np.subtract.outer(*[np.arange(mol.nao)] * 2) ** 2)
    dm = HERMITICITY[hermi](np.random.default_rng(0).normal(size=(mol.nao, mol.nao)) * decay)
    jk = md4.JK(mol, backend="cpu", direct_scf_tol=1e-7)
    assert jk._frame.rotation is not None
    ours = jk.get_jk(dm, hermi)
    assert jk.stats.skipped > 0
    turning(False)
    for mine, exact in zip(ours, md4.get_jk(mol, dm, hermi, backend="cpu", direct_scf_tol=1e-18)):
        assert abs(mine - exact).max() <= 1e-7 * mol.nbas**2


def test_emulated_gpu(monkeypatch):
    """A GPU turns where there are functions that gain; here already with p functions, so that it takes little time."""
    monkeypatch.setattr("md4.gpu.part_plans.PLANE_L", 1)
    mol = askew("O 0 0 0; H 0 0.8 0.6", {"O": [[0, [1.1, 1.0]], [1, [0.9, 1.0]]], "H": [[0, [0.7, 1.0]]]}, spin=1)
    dm = random_densities(mol, 0)
    with running():
        jk = md4.JK(mol, backend="cuda")
        ours = jk.get_jk(dm, 0)
    assert jk._frame.rotation is not None
    for mine, theirs in zip(ours, md4.get_jk(mol, dm, 0, backend="cpu")):
        assert abs(mine - theirs).max() <= 1e-12 * abs(theirs).max()


def test_low_functions_do_not_gain():
    sums = DeviceSums(None)
    assert not sums.gains_by_plane(Basis.from_mol(molecule(WATER, "cc-pvdz")))
    assert sums.gains_by_plane(Basis.from_mol(molecule(WATER, "cc-pvqz")))


@pytest.mark.gpu
@pytest.mark.parametrize("hermi", HERMITICITY)
@pytest.mark.parametrize("atoms, basis", [(WATER, "cc-pvqz"), (CARBON_DIOXIDE, "cc-pvqz"), (BENZENE, "cc-pvtz")])
def test_gpu(gpu, atoms, basis, hermi):
    mol = askew(atoms, basis)
    dm, jk = random_densities(mol, hermi), md4.JK(mol, backend="cuda")
    assert jk._frame.rotation is not None
    for options in ({}, {"with_k": False}):
        ours, theirs = jk.get_jk(dm, hermi, **options), md4.get_jk(mol, dm, hermi, backend="cpu", **options)
        for mine, reference in zip(ours, theirs):
            assert mine is reference is None or abs(mine - reference).max() < 1e-9


@pytest.mark.parametrize("turned", [True, False])
def test_the_tolerance_of_derivatives(turned, turning):
    """A derivative along an axis is one along three turned axes of turned elements, whose factors add up."""
    turning(turned)
    jk, mol, given = md4.JK(MOLECULES["water"], backend="cpu"), MOLECULES["water"], []
    assert (jk._frame.sharpening < 1) == turned
    inner = jk.team.matrices
    jk.team.matrices = lambda *args: given.append(args[4]) or inner(*args)
    jk.derivative_jk(random_densities(mol)[0], tolerance=1e-9)
    assert given == [pytest.approx(1e-9 * (jk._frame.sharpening / np.sqrt(3) if turned else 1.0), rel=1e-12)]


@pytest.mark.parametrize("turned", [True, False])
def test_the_tolerance_of_builds(turned, turning):
    """A quartet that is left out adds less than the tolerance to elements of the molecule as it is."""
    turning(turned)
    jk, given = md4.JK(MOLECULES["water"], backend="cpu"), []
    inner = jk.team.run
    jk.team.run = lambda build, progress: given.append(build.tolerance) or inner(build, progress)
    jk.get_jk(random_densities(MOLECULES["water"])[0], direct_scf_tol=1e-9)
    assert given == [pytest.approx(1e-9 / (5 if turned else 1), rel=1e-12)]


@pytest.mark.parametrize("turned", [True, False])
def test_promised_errors_of_forces(turned, turning):
    """A component of a turned force has up to sqrt(3) times what each of its own components may lack."""
    turning(turned)
    jk, found = md4.JK(MOLECULES["water"], backend="cpu"), []
    inner = jk.team.forces
    jk.team.forces = lambda *args: found.append(inner(*args)) or found[-1]
    jk.gradient(random_densities(MOLECULES["water"])[0], tolerance=1.0)
    ((_, (_, left_out, squares), *_),) = found
    factor = np.sqrt(3) if turned else 1.0
    assert left_out > 0
    assert jk.stats.error_bound == pytest.approx(factor * left_out, rel=1e-6)  # and what no list has, which is less
    assert jk.stats.error_estimate == pytest.approx(factor * np.sqrt(squares), rel=1e-12)
