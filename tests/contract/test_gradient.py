"""`JK.gradient`, `JK.product_gradient` and `JK.derivative_jk`: against PySCF, and what is promised of their errors."""

from dataclasses import replace

import numpy as np
import pytest
from molecules import CENTRES, molecule
from nuclear_forces import (
    MIXED,
    SHELLS,
    WATER,
    derivatives_of_jk,
    few,
    forces_by_pyscf,
    forces_by_tensor,
    mixed,
    rows_of_atoms,
    symmetric,
)
from places import EXAMPLES
from pyscf import grad, gto, scf
from solvers import solver
from traced_memory import OBJECTS_MB, named, traced, until_enough

import md4
from md4.contract.gradient import energy_terms, separated
from md4.errors import ArgumentError, MemoryLimitError, UnsupportedError
from md4.gpu.tuning import REVERSE
from md4.method.mirror import ao_parities, between_parities
from md4.shells.basis import Basis
from md4.shells.shell import Shell

CLOSE = 1e-10  # Hartree/Bohr
OMEGAS = [0.0, 0.3, -0.3]
FACTORS = [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (-0.4, 2.5), (0.0, 0.0)]


@pytest.fixture(scope="module")
def mol():
    return mixed()


@pytest.fixture(scope="module")
def jk(mol):
    return md4.JK(mol, backend="cpu")


@pytest.fixture(scope="module")
def tensors(mol):
    """int2e_ip1 by omega; erfc as Coulomb minus erf."""
    with mol.with_range_coulomb(0.3):
        of_erf = mol.intor("int2e_ip1")
    whole = mol.intor("int2e_ip1")
    return {0.0: whole, 0.3: of_erf, -0.3: whole - of_erf}


def any_matrices(nao, count=None, seed=0):
    """Random matrices without symmetry."""
    return np.random.default_rng(seed).normal(size=(nao, nao) if count is None else (count, nao, nao))


# the gradient of an energy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("count", [None, 2], ids=["closed shell", "two spins"])
@pytest.mark.parametrize("coulomb, exchange", FACTORS)
def test_gradient(mol, jk, coulomb, exchange, count, omega):
    """General contractions, ghosts, an atom without functions; J alone goes through the Hermite basis."""
    dm = symmetric(mol.nao, count)
    kept = dm.copy()
    found = jk.gradient(dm, coulomb, exchange, omega)
    assert found.shape == (mol.natm, 3)
    assert abs(found - forces_by_pyscf(mol, dm, coulomb, exchange, omega)).max() < CLOSE
    assert abs(found.sum(axis=0)).max() < 1e-12
    assert not found[1].any()  # it has no functions
    np.testing.assert_array_equal(dm, kept)


@pytest.mark.parametrize("count", [None, 2], ids=["closed shell", "two spins"])
@pytest.mark.parametrize("coulomb, exchange, factor, omega", [
    (1.0, 0.19, 0.46, 0.0), (1.0, 0.25, -0.25, 0.0), (1.0, 0.0, 1.0, 0.0), (0.0, -0.5, 1.5, 0.0), (0.7, 0.0, 0.0, 0.0),
    (1.0, 0.19, 0.46, 0.2), (1.0, 0.25, -0.25, 0.2),
])  # fmt: skip
def test_long_range(mol, jk, coulomb, exchange, factor, omega, count):
    """CAM-B3LYP, HSE06, long-range corrected functionals and others; the last two with another operator than 1/r."""
    dm = symmetric(mol.nao, count)
    want = forces_by_pyscf(mol, dm, coulomb, exchange, omega) + forces_by_pyscf(mol, dm, 0.0, factor, 0.4)
    assert abs(jk.gradient(dm, coulomb, exchange, omega, long_range=(0.4, factor)) - want).max() < CLOSE


@pytest.mark.parametrize("alpha, beta", [(0.19, 0.46), (0.25, -0.25), (0.0, 1.0)])
def test_long_range_of_a_backend_without_mixtures(mol, jk, alpha, beta):
    dm = symmetric(mol.nao)
    terms = energy_terms(dm, 1.0, 1.0, mol.nao)
    found = jk._gradient(lambda operator: separated(terms, operator, alpha, (0.4, beta), False), None, None)
    want = forces_by_pyscf(mol, dm, 1.0, alpha) + forces_by_pyscf(mol, dm, 0.0, beta, 0.4)
    assert abs(found - want).max() < CLOSE


def test_cartesian_functions(backend):
    mol = mixed(cart=True) if backend == "cpu" else few(cart=True)
    dm = symmetric(mol.nao)
    assert abs(md4.JK(mol, backend=backend).gradient(dm) - forces_by_pyscf(mol, dm)).max() < CLOSE


@pytest.mark.thorough
@pytest.mark.parametrize("backend, cart", [
    ("cpu", False), ("cpu", True), pytest.param("cuda", False, marks=pytest.mark.gpu),
], indirect=["backend"], ids=["cpu-spherical", "cpu-Cartesian", "cuda-spherical"])  # fmt: skip
def test_functions_s_to_i(cart, backend):
    """All classes in one molecule, s and p contracted; Cartesian ones, with kernels of their own, on the CPU only."""
    shells = [
        [0, [5.0, 0.4], [0.9, 0.7]],
        [1, [3.0, 0.3], [0.7, 0.8]],
        *([l, [0.6 + 0.1 * l, 1.0]] for l in range(2, 7)),
    ]
    mol = molecule("O 0 0 0; H 0.3 0.5 -0.6", {"O": shells, "H": [[0, [0.8, 1.0]]]}, cart=cart)
    dm = symmetric(mol.nao)
    want = forces_by_pyscf(mol, dm)
    assert abs(md4.JK(mol, backend=backend).gradient(dm) - want).max() < 1e-12 * abs(want).max() + CLOSE


def test_i_functions():
    mol = molecule("O 0 0 0; H 0.3 0.5 -0.6", {"O": [[6, [1.1, 1.0]]], "H": [[0, [0.8, 1.0]], [1, [0.6, 1.0]]]})
    dm = symmetric(mol.nao)
    want = forces_by_pyscf(mol, dm)
    assert abs(md4.JK(mol, backend="cpu").gradient(dm) - want).max() < 1e-12 * abs(want).max() + CLOSE


@pytest.mark.parametrize("basis", ["roosdz", "cc-pvdz", "6-31g"])
def test_densities_of_solvers(basis, backend):
    """The two-electron part of the gradient of a converged closed shell, in bundled basis sets."""
    mol = molecule("H 0.1 0.2 0; F 0 0.1 0.9", basis)
    mf = solver("RHF", mol).run()
    jk = md4.JK(mol, backend=backend)
    assert abs(jk.gradient(mf.make_rdm1()) - forces_by_pyscf(mol, mf.make_rdm1())).max() < CLOSE


MANY = {
    "F": [[0, [30.0, 0.3, 0.1, -0.2, 0.5], [2.0, 0.5, -0.2, 0.4, 0.1], [0.5, 0.4, 0.9, 0.3, 0.2],
           [0.2, 0.0, 0.1, 0.3, 0.6]], [1, [2.0, 0.4, 0.2], [0.6, 0.7, -0.5]], [2, [0.8, 1.0]]],
    "H": [[0, [1.2, 1.0]]],
}  # fmt: skip


@pytest.mark.parametrize("cart", [False, True], ids=["spherical", "Cartesian"])
def test_many_contracted_functions(cart):
    """Primitives take their place; for a `Basis`, too, after a move, and in the memory that may be used."""
    mol = molecule("H 0.1 0.2 0; F 0 0.1 0.9", MANY, cart=cart)
    dm, jk = symmetric(mol.nao), md4.JK(mol, backend="cpu")
    for omega in (0.0, 0.3):
        assert abs(jk.gradient(dm, omega=omega) - forces_by_pyscf(mol, dm, omega=omega)).max() < CLOSE
    other, coefficients, _ = jk._on_primitives()
    assert other.basis.nshell == 8
    assert abs(coefficients).max() == 1
    assert other.engine.backend.memory is jk.engine.backend.memory
    assert other.engine.lock is jk.engine.lock  # the workspaces in this memory are for one thread at a time
    general = any_matrices(mol.nao, 2)
    for mine, theirs in zip(jk.derivative_jk(general), derivatives_of_jk(mol, general)):
        assert abs(mine - theirs).max() < CLOSE
    left, right = general
    want = rows_of_atoms(mol, forces_by_tensor(mol.intor("int2e_ip1"), left, right))
    assert abs(jk.product_gradient(left, right) - want).max() < CLOSE
    of_shells = md4.JK(Basis.from_mol(mol), backend="cpu").gradient(dm)
    assert of_shells.shape == (mol.nbas, 3)
    for atom, rows in enumerate(([0], [1, 2, 3])):
        assert abs(of_shells[rows].sum(axis=0) - jk.gradient(dm)[atom]).max() < 1e-12
    mol.set_geom_("H 0 0 0; F 0 0.3 1.1")
    assert abs(jk.gradient(dm) - forces_by_pyscf(mol, dm)).max() < CLOSE


def test_many_contracted_functions_in_another_order():
    """A function of other primitives stands between four that share theirs, which come together where it is split off.
    """
    rows = [[30.0, 0.3, 0.0, 0.1, -0.2, 0.5], [2.0, 0.5, 0.0, -0.2, 0.4, 0.1], [0.5, 0.4, 0.0, 0.9, 0.3, 0.2],
            [0.2, 0.1, 0.0, 0.1, 0.3, 0.6], [0.7, 0.0, 1.0, 0.0, 0.0, 0.0]]  # fmt: skip
    mol = molecule("H 0.1 0.2 0; F 0 0.1 0.9", {"F": [[0, *rows], [1, [0.8, 1.0]]], "H": [[0, *rows]]})
    dm, jk = symmetric(mol.nao), md4.JK(mol, backend="cpu")
    assert jk._on_primitives() is not None
    assert list(jk._frame.order) != sorted(jk._frame.order)
    assert abs(jk.gradient(dm) - forces_by_pyscf(mol, dm)).max() < CLOSE
    of_shells = md4.JK(Basis.from_mol(mol), backend="cpu").gradient(dm)
    assert abs(of_shells[1:].sum(axis=0) - jk.gradient(dm)[1]).max() < 1e-12
    general = any_matrices(mol.nao, 2)
    for mine, theirs in zip(jk.derivative_jk(general), derivatives_of_jk(mol, general)):
        assert abs(mine - theirs).max() < CLOSE


def test_densities_of_both_spins(backend):
    mol = molecule("O 0 0 0; H 0.3 0.2 0.9", "6-31g")
    dm = np.asarray(solver("UHF", mol).run().make_rdm1())
    found = md4.JK(mol, backend=backend).gradient(dm)
    assert abs(found - forces_by_pyscf(mol, dm)).max() < CLOSE
    closed = (dm[0] + dm[1]) / 2
    both = md4.JK(mol, backend=backend).gradient(np.stack([closed, closed]))
    assert abs(both - md4.JK(mol, backend=backend).gradient(2 * closed)).max() < 1e-12


def test_no_torque():
    """s functions are the same in all directions, so the energy of any density stays what it is in a rotation."""
    mol = molecule("H 0 0 0; H 0.3 0.9 0.1; H -0.5 0.4 1.1; H 1.3 0.2 -0.4", "6-31g")
    found = md4.JK(mol, backend="cpu").gradient(symmetric(mol.nao))
    assert abs(found).max() > 0.1
    assert abs(np.cross(mol.atom_coords(), found).sum(axis=0)).max() < 1e-12


def energy(basis, dm):
    vj, vk = md4.JK(basis, backend="cpu", direct_scf_tol=0).get_jk(dm)
    return np.sum(dm * (vj / 2 - vk / 4))


def slope(energy_at, step):
    """The derivative at 0, by Richardson's extrapolation of three differences."""
    one, two, three = ((energy_at(n * step) - energy_at(-n * step)) / (2 * n * step) for n in (1, 2, 3))
    return 1.5 * one - 0.6 * two + 0.1 * three


@pytest.mark.parametrize("ls, pure, places", [
    ((7, 0, 1, 2), True, [(0, 0), (2, 1)]), ((3, 1, 2, 0), False, [(0, 2), (1, 0), (3, 1)]),
    pytest.param((7, 0, 7, 1), True, [(0, 0), (2, 1), (3, 2)], marks=pytest.mark.thorough),
    pytest.param((7, 1, 6, 0), False, [(0, 0), (1, 1)], marks=pytest.mark.thorough),
])  # fmt: skip
def test_differences_of_energies(ls, pure, places):
    """Up to l = 7, which libcint has not; rows of a `Basis` are those of its shells."""

    def at(centres):
        exponents = (1.1, 0.6, 0.8, 0.9)
        return Basis([Shell(l, [e], [[1.0]], r) for l, e, r in zip(ls, exponents, centres)], pure)

    dm = symmetric(at(CENTRES).nao)
    found = md4.JK(at(CENTRES), backend="cpu").gradient(dm)
    assert found.shape == (4, 3)
    assert abs(found.sum(axis=0)).max() < 1e-12 * abs(found).max() + 1e-12
    for shell, axis in places:

        def moved(step, shell=shell, axis=axis):
            centres = CENTRES.copy()
            centres[shell, axis] += step
            return energy(at(centres), dm)

        assert abs(slope(moved, 0.01) - found[shell, axis]) < 1e-9 * abs(found).max()


def test_rows_of_shells(mol, jk):
    """Those of the shells of a molecule add up to those of its atoms, also where general contractions are split."""
    dm = symmetric(mol.nao)
    basis = Basis.from_mol(mol)
    found = md4.JK(basis, backend="cpu").gradient(dm)
    assert found.shape == (basis.nshell, 3)
    of_atoms = np.zeros((mol.natm, 3))
    np.add.at(of_atoms, mol._bas[:, gto.ATOM_OF], found)
    assert abs(of_atoms - jk.gradient(dm)).max() < 1e-12
    vj, vk = derivatives_of_jk(mol, dm[None])
    of_aos = 2 * np.einsum("xij,ij->ix", vj[0] - vk[0] / 2, dm)
    assert abs(found - np.add.reduceat(of_aos, basis.ao_loc[:-1])).max() < CLOSE


def test_long_range_without_omega(mol, jk):
    """As PySCF has it for functionals that are not range-separated, (0, 0, hyb)."""
    dm = symmetric(mol.nao)
    np.testing.assert_array_equal(jk.gradient(dm, exchange=0.2, long_range=(0.0, -0.2)), jk.gradient(dm, exchange=0.2))


@pytest.mark.parametrize("exponent, tolerance", [(1e-45, 1e-13), (1.0, 1e10)])
def test_no_pair_is_in_a_list(exponent, tolerance):
    """Nothing but the bound of all that was left out."""
    basis = Basis.from_arrays([0, 0], [[exponent]] * 2, [[[1.0]]] * 2, CENTRES[:2], normalise=True)
    jk, dm = md4.JK(basis, backend="cpu", direct_scf_tol=tolerance), np.eye(2)
    for call in (jk.gradient, jk.product_gradient):
        assert not call(dm).any()
        assert jk.stats.computed == 0 < jk.stats.error_bound
    assert not np.any(jk.derivative_jk(dm))


def test_omega_of_the_molecule():
    """It is the default, as of J and K; that of the constructor comes before it."""
    mol = molecule(WATER, "sto-3g")
    dm, plain = symmetric(mol.nao), md4.JK(mol, backend="cpu")
    mol_of_erf = mol.copy()
    mol_of_erf.omega = 0.4
    for jk in (md4.JK(mol_of_erf, backend="cpu"), md4.JK(mol, omega=0.4, backend="cpu")):
        np.testing.assert_array_equal(jk.gradient(dm), plain.gradient(dm, omega=0.4))
        np.testing.assert_array_equal(jk.gradient(dm, omega=0.0), plain.gradient(dm))
        np.testing.assert_array_equal(jk.derivative_jk(dm), plain.derivative_jk(dm, omega=0.4))


def test_molecule_moved_in_place():
    mol = molecule(WATER, "sto-3g").copy()
    jk, dm = md4.JK(mol, backend="cpu"), symmetric(mol.nao)
    before = jk.gradient(dm)
    mol.set_geom_(mol.atom_coords() * 1.1, unit="Bohr")
    assert abs(jk.gradient(dm) - before).max() > 1e-3
    assert abs(jk.gradient(dm) - forces_by_pyscf(mol, dm)).max() < CLOSE
    mol.set_geom_(mol.atom_coords() * 1.1, unit="Bohr")
    vj, vk = derivatives_of_jk(mol, dm[None])
    for found, want in zip(jk.derivative_jk(dm), (vj[0], vk[0])):
        assert abs(found - want).max() < CLOSE


@pytest.mark.parametrize("first, second", [("H 0 0 0; H 0 0 1", WATER), (WATER, "H 0 0 0; H 0 0 1")])
def test_molecule_with_other_functions_in_place(first, second):
    """Densities are those of the functions that the molecule has now, and no others."""
    mol = molecule(first, "sto-3g").copy()
    jk, old = md4.JK(mol, backend="cpu"), symmetric(mol.nao)
    jk.gradient(old)
    mol.atom = second
    mol.build()
    for call in (jk.gradient, jk.product_gradient, jk.derivative_jk):
        with pytest.raises(ArgumentError, match=f"must have shape .{mol.nao}, {mol.nao}."):
            call(old)
    dm = symmetric(mol.nao)
    assert abs(jk.gradient(dm) - forces_by_pyscf(mol, dm)).max() < CLOSE


def test_reset():
    """To another molecule, and to a basis."""
    mol, other = molecule(WATER, "sto-3g"), molecule("H 0 0 0; F 0 0.1 0.9", "6-31g")
    jk = md4.JK(mol, backend="cpu")
    jk.gradient(symmetric(mol.nao))
    jk.reset(other)
    dm = symmetric(other.nao)
    assert abs(jk.gradient(dm) - forces_by_pyscf(other, dm)).max() < CLOSE
    jk.reset(Basis.from_mol(mol))
    assert jk.gradient(symmetric(mol.nao)).shape == (mol.nbas, 3)


def test_densities_symmetric_but_for_rounding(mol, jk):
    """An antisymmetric part that small changes nothing."""
    dm, other = symmetric(mol.nao), any_matrices(mol.nao)
    noise = 1e-9 * (other - other.T)
    want = jk.gradient(dm)
    for exchange in (1.0, 0.0):
        want = jk.gradient(dm, exchange=exchange)
        assert abs(jk.gradient(dm + noise, exchange=exchange) - want).max() < 1e-13 * abs(want).max()


# products, and J and K of derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("coulomb, exchange", FACTORS)
def test_products(mol, jk, tensors, coulomb, exchange, omega):
    """Of matrices without symmetry."""
    left, right = any_matrices(mol.nao, 2)
    want = rows_of_atoms(mol, forces_by_tensor(tensors[omega], left, right, coulomb, exchange))
    assert abs(jk.product_gradient(left, right, coulomb, exchange, omega) - want).max() < CLOSE


def test_several_products(mol, jk, tensors):
    """With factors of their own, or the same ones; of matrices with themselves; symmetric and antisymmetric ones."""
    left, right = any_matrices(mol.nao, 3, 1), any_matrices(mol.nao, 3, 2)
    left[1], right[2] = left[1] + left[1].T, right[2] - right[2].T
    for coulomb, exchange in (([0.3, -1.0, 2.0], [0.5, 0.0, 1.0]), (0.5, [2.0]), ([1.0, 0.0, 0.0], 0.0)):
        every = zip(left, right, np.broadcast_to(coulomb, 3), np.broadcast_to(exchange, 3))
        want = sum(rows_of_atoms(mol, forces_by_tensor(tensors[0.0], *one)) for one in every)
        assert abs(jk.product_gradient(left, right, coulomb, exchange) - want).max() < CLOSE
    want = sum(rows_of_atoms(mol, forces_by_tensor(tensors[0.0], one, one)) for one in left)
    assert abs(jk.product_gradient(left) - want).max() < CLOSE


def test_an_energy_as_products(mol, jk):
    dm, spins = symmetric(mol.nao), symmetric(mol.nao, 2, seed=1)
    assert abs(jk.product_gradient(dm, exchange=0.5) - jk.gradient(dm)).max() < 1e-12
    found = jk.product_gradient([*spins, spins.sum(axis=0)], coulomb=[0, 0, 1], exchange=[1, 1, 0])
    assert abs(found - jk.gradient(spins)).max() < 1e-12


@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("count", [None, 1, 3])
def test_derivative_jk(mol, jk, tensors, count, omega):
    """Of matrices without symmetry, against sums over the tensor."""
    dm = any_matrices(mol.nao, count)
    want = [-np.einsum(indices, tensors[omega], dm) for indices in ("xijkl,...lk->...xij", "xijkl,...jk->...xil")]
    found = jk.derivative_jk(dm, omega=omega)
    for mine, theirs in zip(found, want, strict=True):
        assert mine.shape == (*dm.shape[:-2], 3, mol.nao, mol.nao)
        assert abs(mine - theirs).max() < CLOSE
    for with_j, with_k in ((True, False), (False, True), (False, False)):
        alone = jk.derivative_jk(dm, with_j=with_j, with_k=with_k, omega=omega)
        for mine, both, wanted in zip(alone, found, (with_j, with_k)):
            assert (mine is not None) == wanted
            assert mine is None or abs(mine - both).max() < 1e-12


def test_derivative_jk_of_cartesian_functions():
    mol = mixed(cart=True)
    dm = any_matrices(mol.nao, 2)
    for mine, theirs in zip(md4.JK(mol, backend="cpu").derivative_jk(dm), derivatives_of_jk(mol, dm)):
        assert abs(mine - theirs).max() < CLOSE


@pytest.mark.parametrize("hermi", [0, 1, 2])
def test_derivative_jk_with_a_symmetry(mol, jk, hermi):
    """`hermi` changes nothing."""
    dm = any_matrices(mol.nao)
    dm = {0: dm, 1: dm + dm.T, 2: dm - dm.T}[hermi]
    np.testing.assert_array_equal(jk.derivative_jk(dm, hermi), jk.derivative_jk(dm))


# on a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("count", [None, 2], ids=["closed shell", "two spins"])
@pytest.mark.parametrize("coulomb, exchange", FACTORS)
def test_gradient_on_a_gpu(mol, coulomb, exchange, count, omega, gpu):
    mol = few() if omega else mol
    dm, on_gpu = symmetric(mol.nao, count), md4.JK(mol, backend="cuda")
    found = on_gpu.gradient(dm, coulomb, exchange, omega)
    assert abs(found - forces_by_pyscf(mol, dm, coulomb, exchange, omega)).max() < CLOSE
    assert abs(found.sum(axis=0)).max() < 1e-11
    np.testing.assert_array_equal(on_gpu.gradient(dm, coulomb, exchange, omega), found)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [None, 2], ids=["closed shell", "two spins"])
def test_j_apart_on_a_gpu(count, gpu):
    """A chain of molecules so long that J is made apart from exchange; also in memory that is short.

    With enough it has the same bits in each run.
    """
    water = "O 0 0 {0}; H 0.7 0.1 {1}; H -0.7 0 {2}"
    mol = molecule("; ".join(water.format(z, z + 0.5, z + 0.4) for z in range(0, 72, 3)), "cc-pvdz")
    dm = scf.RHF(mol).get_init_guess()
    dm = dm if count is None else np.array([0.6 * dm, 0.4 * dm])
    on_cpu = md4.JK(mol, backend="cpu")
    right = on_cpu.gradient(dm)
    for megabytes in (None, 600):
        on_gpu = md4.JK(mol, backend="cuda", max_memory=megabytes)
        found = on_gpu.gradient(dm)
        assert on_gpu.team.workers[0].forces.apart
        assert abs(found - right).max() < 1e-9
        assert abs(found - right).max() < on_gpu.stats.error_bound + on_cpu.stats.error_bound
        pairs = sum(map(len, on_gpu.lists))
        assert on_gpu.stats.computed + on_gpu.stats.skipped == 2 * pairs**2
        if megabytes is None:
            np.testing.assert_array_equal(on_gpu.gradient(dm), found)


@pytest.mark.gpu
@pytest.mark.parametrize("exchange", [[0.5, 0.0, 1.0], 0.0])
def test_products_on_a_gpu(mol, jk, exchange, gpu):
    left, right = any_matrices(mol.nao, 3, 1), any_matrices(mol.nao, 3, 2)
    on_gpu, given = md4.JK(mol, backend="cuda"), (left, right, [0.3, -1.0, 2.0], exchange)
    assert abs(on_gpu.product_gradient(*given) - jk.product_gradient(*given)).max() < CLOSE


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"with_j": False}, {"with_k": False}, {"omega": OMEGAS[-1]}], ids=str)
@pytest.mark.parametrize("cart", [False, True])
def test_derivative_jk_on_a_gpu(cart, options, gpu):
    """Of matrices without symmetry."""
    mol = mixed(cart=cart)
    dm, on_gpu, on_cpu = any_matrices(mol.nao, 3), md4.JK(mol, backend="cuda"), md4.JK(mol, backend="cpu")
    for mine, theirs in zip(on_gpu.derivative_jk(dm, **options), on_cpu.derivative_jk(dm, **options)):
        assert mine is theirs is None or abs(mine - theirs).max() < CLOSE


@pytest.mark.gpu
@pytest.mark.parametrize("basis", ["cc-pvtz", "cc-pvqz"])
def test_derivative_jk_of_a_molecule_on_a_gpu(basis, gpu):
    """It lies askew, and is turned; also in memory that is short. With enough it has the same bits in each run."""
    mol = molecule(WATER, basis)
    dm = any_matrices(mol.nao)
    right = md4.JK(mol, backend="cpu").derivative_jk(dm)
    for megabytes in (None, 200):
        on_gpu = md4.JK(mol, backend="cuda", max_memory=megabytes)
        found = on_gpu.derivative_jk(dm)
        for mine, theirs in zip(found, right):
            assert abs(mine - theirs).max() < 1e-11 * abs(theirs).max()
        if megabytes is None:
            np.testing.assert_array_equal(on_gpu.derivative_jk(dm), found)


@pytest.mark.gpu
@pytest.mark.parametrize("atom, basis", [
    (EXAMPLES / "benzene.xyz", "cc-pvdz"), (WATER, "cc-pvtz"), (WATER, "cc-pvqz"),
], ids=["benzene cc-pvdz", "water cc-pvtz", "water cc-pvqz"])  # fmt: skip
def test_molecules_in_a_plane_on_a_gpu(atom, basis, gpu):
    """Beside the CPU, by what both leave out; the same bits in each run, and by a second object.

    Water lies askew, and is turned.
    """
    mol = molecule(atom if isinstance(atom, str) else atom.read_text().split("\n", 2)[2], basis)
    dm, on_cpu, on_gpu = scf.RHF(mol).get_init_guess(), md4.JK(mol, backend="cpu"), md4.JK(mol, backend="cuda")
    for options in ({}, {"exchange": 0.0}, {"tolerance": 1e-6}):
        found, right = on_gpu.gradient(dm, **options), on_cpu.gradient(dm, **options)
        assert abs(found - right).max() < CLOSE + on_gpu.stats.error_bound + on_cpu.stats.error_bound
        if "tolerance" not in options:  # with it 0.10 for benzene and 0.0073 for water in cc-pVTZ, one H100
            assert on_gpu.stats.error_bound < 1e-3
        for jk in (on_gpu, md4.JK(mol, backend="cuda")):
            np.testing.assert_array_equal(jk.gradient(dm, **options), found)
    assert (on_gpu._frame.rotation is not None) == isinstance(atom, str)


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "as it is"])
@pytest.mark.parametrize("cart", [False, True])
def test_even_and_odd_functions_on_a_gpu(cart, apart, gpu, monkeypatch):
    """Densities with the symmetry of the plane, without, and nearly; of two spins, with a mixture of operators."""
    if apart:
        monkeypatch.setattr("md4.gpu.reverse_ways.LEAST_SAVED", -np.inf)
    mol = molecule("C 0 0.1 0.3; O 0 1.2 1.3; H 0 -0.7 1.0; H 0 0.4 -0.7", "cc-pvtz" if cart else "cc-pvqz", cart=cart)
    basis = Basis.from_mol(mol)
    on_cpu, on_gpu = md4.JK(mol, backend="cpu"), md4.JK(mol, backend="cuda")
    dm = scf.UHF(mol).get_init_guess() + 1e-3 * symmetric(mol.nao, 2)
    between = between_parities(ao_parities(basis.classes, basis.pure, basis.mirror_axis), dm)
    for mixed_by, options in (
        (0.0, {}), (1.0, {}), (1e-12, {}), (0.0, {"exchange": 0.2, "long_range": (0.4, 0.6)}), (1.0, {"coulomb": 0.0}),
    ):  # fmt: skip
        given = dm - between + mixed_by * between
        found, right = on_gpu.gradient(given, **options), on_cpu.gradient(given, **options)
        assert abs(found - right).max() < 1e-9
        assert abs(found - right).max() < on_gpu.stats.error_bound + on_cpu.stats.error_bound + CLOSE
        np.testing.assert_array_equal(on_gpu.gradient(given, **options), found)
        assert (abs(right[:, 0]).max() > 1e-6) == (mixed_by == 1)
        assert mixed_by == 1 or abs(found[:, 0]).max() < on_gpu.stats.error_bound


@pytest.mark.gpu
@pytest.mark.parametrize("count", [None, 2], ids=["closed shell", "two spins"])
def test_small_quartets_in_tf32_on_a_gpu(count, gpu, monkeypatch):
    """Of all classes that can: forces change, by less than what is left out may do, and have the same bits again."""
    mol, found = waters(2, "cc-pvtz"), []
    dm = symmetric(mol.nao, count)
    for ratio in (0.0, REVERSE.single_ratio):
        tuning = replace(REVERSE, single_ratio=ratio, single_share=0.0, single_seconds=0.0)
        monkeypatch.setattr("md4.gpu.forces.REVERSE", tuning)
        jk = md4.JK(mol, backend="cuda")
        found.append(jk.gradient(dm, tolerance=1e-9))
        np.testing.assert_array_equal(jk.gradient(dm, tolerance=1e-9), found[-1])
    assert 0 < abs(found[1] - found[0]).max() < jk.stats.error_estimate
    assert abs(found[1].sum(axis=0)).max() < jk.stats.error_estimate


@pytest.mark.gpu
@pytest.mark.parametrize("megabytes", [3, 10, 40])
def test_little_memory_on_a_gpu(megabytes, gpu):
    """It is refused, or enough, with H of the kets in batches and Z in pieces."""
    mol = molecule(WATER, "cc-pvtz")
    dm, messages = symmetric(mol.nao), []
    want = forces_by_pyscf(mol, dm)
    try:
        found = md4.JK(mol, backend="cuda", max_memory=megabytes).gradient(dm)
    except MemoryLimitError as error:
        messages.append(str(error))
        found = want
    assert abs(found - want).max() < 1e-12 * abs(want).max() + CLOSE
    assert all("raise max_memory" in message for message in messages)
    assert not messages or megabytes < 40


@pytest.mark.gpu
@pytest.mark.parametrize("count, basis", [(4, "sto-3g"), (4, "6-31g"), (2, "6-31g*")])
def test_errors_are_bounded_on_a_gpu(count, basis, gpu):
    check_errors(waters(count, basis), {}, "cuda")


# errors that are promised ---------------------------------------------------------------------------------------------


def waters(count, basis, gap=3.0):
    """Water molecules in a plane of distances `gap` Angstrom, each a bit higher than the one before."""
    one = [word.split() for word in WATER.split(";")]
    return molecule([
        (symbol, np.array(place, dtype=float) + np.array([gap * (n % 2), gap * (n // 2), 0.3 * n]))
        for n in range(count) for symbol, *place in one
    ], basis)  # fmt: skip


def assert_bounded(jk, dm, exact, tolerances, **options):
    """The errors are below their bounds, which grow with the tolerance, as does what is left out."""
    before, noise = (0.0, 0), 1e-13 * abs(exact).max()
    for tolerance in tolerances:
        found, stats = jk.gradient(dm, tolerance=tolerance, **options), jk.stats
        assert abs(found - exact).max() <= stats.error_bound + noise
        assert stats.error_estimate <= stats.error_bound
        passes = 2 if "long_range" in options else 1
        assert stats.skipped + stats.computed == passes * sum(map(len, jk.lists)) ** 2
        assert stats.skipped or not stats.error_bound
        assert before[0] <= stats.error_bound * (1 + 1e-12)
        assert before[1] <= stats.skipped
        before = stats.error_bound, stats.skipped
    assert before[1]


@pytest.mark.sample("options*-sto-3g-4")
@pytest.mark.parametrize(
    "count, basis", [(4, "sto-3g"), (4, "6-31g"), (2, "6-31g*")], ids=["sto-3g-4", "6-31g-4", "6-31g*-2"]
)
@pytest.mark.parametrize("options", [{}, {"exchange": 0.0}, {"coulomb": 0.0}])
def test_errors_are_bounded(count, basis, options):
    check_errors(waters(count, basis), options)


def test_errors_of_erfc_are_bounded():
    check_errors(waters(2, "sto-3g"), {"omega": -0.3})


@pytest.mark.parametrize("exchange, factor", [(0.2, -1.0), (-1.0, 0.3), (1e-3, 1.0)])
def test_errors_of_long_range_exchange_are_bounded(exchange, factor):
    """Both factors of the operator, at short and at long distances, count in bounds, whatever their signs."""
    check_errors(waters(2, "sto-3g"), {"exchange": exchange, "long_range": (0.4, factor)})


def check_errors(mol, options, backend="cpu"):
    """For densities of several sizes, with and without a decay."""
    jk = md4.JK(mol, backend=backend)
    for seed, decay in ((0, 0.0), (1, 1.5)):
        places = np.repeat(mol.atom_coords(), np.diff(mol.aoslice_by_atom()[:, 2:]).ravel(), axis=0)
        distances = np.linalg.norm(places[:, None] - places, axis=-1)
        dm = symmetric(mol.nao, seed=seed) * np.exp(-decay * distances)
        exact = jk.gradient(dm, tolerance=0, **options)
        assert jk.stats.error_bound == jk.stats.error_estimate == jk.stats.skipped == 0
        for size in (1.0, 1e-3, 1e2):
            assert_bounded(jk, size * dm, size**2 * exact, (1e-12, 1e-10, 1e-8, 1e-6), **options)


def test_bounds_of_one_centre():
    """Where a and b have the same centre, both derivatives of a pair add to the same force."""
    shells = {"He": [[0, [0.548, 1.0]]], "X-H": [[0, [0.793, 1.0]], [1, [0.243, 1.0]]]}
    mol = molecule("He 0 0 0; X-H 0 0 0.186", shells, unit="Bohr")
    jk, dm = md4.JK(mol, backend="cpu"), np.zeros((5, 5))
    dm[0, 0] = dm[1, 4] = dm[4, 1] = 1.0  # an s and a p function of one centre, which together are a dipole
    exact = jk.gradient(dm, exchange=0.0, tolerance=0)
    assert_bounded(jk, dm, exact, np.geomspace(1e-3, 10, 60), exchange=0.0)


def test_lists_are_fine_enough_for_the_tolerance():
    """Primitives that J and K of this tolerance do without would be missing."""
    mol = molecule(WATER, "6-31g")
    dm = symmetric(mol.nao)
    jk = md4.JK(mol, backend="cpu", direct_scf_tol=1e-4)
    assert abs(jk.gradient(dm, tolerance=1e-12) - forces_by_pyscf(mol, dm)).max() < CLOSE
    jk = md4.JK(mol, backend="cpu", direct_scf_tol=1e-4)
    for mine, theirs in zip(jk.derivative_jk(dm, tolerance=1e-13), derivatives_of_jk(mol, dm[None])):
        assert abs(mine - theirs[0]).max() < CLOSE


def test_the_default_tolerance():
    """Ten times that of J and K; it makes no lists anew."""
    mol = waters(4, "sto-3g")
    jk, dm = md4.JK(mol, backend="cpu", direct_scf_tol=1e-9), symmetric(mol.nao)
    lists = jk.lists
    found, bound = jk.gradient(dm), jk.stats.error_bound
    assert jk.lists is lists
    assert bound > 0
    np.testing.assert_array_equal(found, jk.gradient(dm, tolerance=10 * 1e-9))
    assert jk.stats.error_bound == bound


@pytest.mark.parametrize("tolerance", [1e-11, 1e-8, 1e-6])
def test_screening_of_derivative_jk(tolerance):
    """A quartet that is left out adds less than the tolerance to each element."""
    mol = waters(4, "sto-3g")
    jk, dm = md4.JK(mol, backend="cpu"), any_matrices(mol.nao, 2)
    exact = jk.derivative_jk(dm, tolerance=0)
    most = len(jk.basis.shells) ** 2  # quartets that share an element
    off = max(abs(a - b).max() for a, b in zip(jk.derivative_jk(dm, tolerance=tolerance), exact))
    assert 0 < off < most * tolerance


# threads and memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent, distance", [(1e6, 8.5), (1e9, 7.75)])
def test_screening_of_derivative_jk_beside_steep_functions(exponent, distance, backend):
    """Derivatives of what no list has are larger than that: lists are refined where they would be missed."""
    places, tolerance = [[0, 0, 0], [0, 0, 0], [0, 0, distance]], 1e-6
    basis = Basis.from_arrays([0, 1, 0], [[exponent], [exponent], [0.3]], [[[1.0]]] * 3, places)
    dm = np.full((basis.nao, basis.nao), 1e3)
    found, right = (
        md4.JK(basis, backend=name, direct_scf_tol=finest).derivative_jk(dm)
        for name, finest in ((backend, tolerance), ("cpu", 0.0))
    )  # fmt: skip
    for ours, whole in zip(found, right):
        # of the other elements some are so large that rounding errors are more
        assert abs(ours - whole)[:, :4, 4].max() < tolerance
        assert abs(ours - whole)[:, 4, :4].max() < tolerance


def test_lists_of_derivative_jk_are_refined_until_they_are_enough():
    """One step, by what is missing, may list nothing that was not in a list before."""
    places, tolerance = [[0, 0, 0], [0, 0, 3], [0, 0, 11.2]], 3.81e-9
    basis = Basis.from_arrays([1, 0, 0], [[1385473.0], [0.4], [0.3]], [[[1.0]]] * 3, places)
    jk, dm = md4.JK(basis, backend="cpu", direct_scf_tol=tolerance), np.full((1, 5, 5), 300.0)
    assert jk._most_missing(jk._forces_of_lists(tolerance), dm) > tolerance
    jk.derivative_jk(dm)
    assert jk._most_missing(jk._forces_of_lists(jk._finest), dm) <= tolerance


@pytest.mark.parametrize("tolerance, size", [(1e-200, 1.0), (1e-13, 1e200)])
def test_lists_that_cannot_be_refined(tolerance, size):
    """The square of a bound underflows, so no tolerance has the pair in a list; the matrices are made without it."""
    basis = Basis.from_arrays([0, 0], [[1.0]] * 2, [[1.0]] * 2, [[0, 0, 0], [0, 0, 30.0]])
    jk = md4.JK(basis, backend="cpu")
    for matrix in jk.derivative_jk(np.full((2, 2), size), tolerance=tolerance):
        assert np.isfinite(matrix).all()


@pytest.mark.parametrize("seed", [3, 15])
def test_cancellation_hides_no_quartet(seed, backend):
    """The norm of a derivative whose primitives cancel is lost in rounding errors, the integrals are not."""
    rng = np.random.default_rng(seed)
    exponent, centre = rng.uniform(0.3, 3), rng.uniform(-2, 2, 3)
    basis = Basis([
        Shell(0, [exponent, exponent * (1 + 1e-8)], [[1.0], [-1.0]], [0.0, 0.0, 0.0]),
        Shell(0, [rng.uniform(0.2, 2)], [[1.0]], centre), Shell(1, [0.5], [[1.0]], rng.uniform(-2, 2, 3)),
    ])  # fmt: skip
    dm = np.diag([0.0, 1e3, 1e3, 1e3, 1e3])
    dm[0, 1:] = dm[1:, 0] = 1.0
    jk, whole = md4.JK(basis, backend=backend), md4.JK(basis, backend="cpu", direct_scf_tol=0.0)
    right = whole.gradient(dm, exchange=0.0, tolerance=0.0)
    assert abs(jk.gradient(dm, exchange=0.0, tolerance=1e-10) - right).max() < 1e-9
    for ours, right in zip(jk.derivative_jk(dm, tolerance=1e-10), whole.derivative_jk(dm)):
        assert abs(ours - right).max() < 1e-9



def test_the_same_bits(monkeypatch, two_threads):
    """With one thread and with two, in each run, and by a second object."""
    mol = waters(4, "sto-3g")
    dm, jk = symmetric(mol.nao, 2), md4.JK(mol, backend="cpu")
    for options in ({}, {"exchange": 0.0}):
        found = []
        for threads in ("2", "2", "1", "2"):
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
            found += [jk.gradient(dm, **options), md4.JK(mol, backend="cpu").gradient(dm, **options)]
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("method", ["gradient", "product_gradient", "derivative_jk"])
def test_little_memory(method):
    """It is refused with a larger number each time, until it is enough; never is there more than the cap."""
    mol = molecule(WATER, "cc-pvdz")
    dm, caps, messages = symmetric(mol.nao), [0.05], []

    def work(cap=None):
        return np.array(getattr(md4.JK(mol, backend="cpu", max_memory=cap), method)(dm))

    want = work()
    while isinstance((found := traced(lambda: work(caps[-1])))[0], MemoryLimitError):
        error, peak = found
        messages.append(str(error))
        assert peak < caps[-1] + OBJECTS_MB
        assert "may be used; raise max_memory" in messages[-1]
        caps.append(named(error))
        assert caps[-1] > caps[-2]
    assert abs(found[0] - want).max() < 1e-12
    assert found[1] < caps[-1] + OBJECTS_MB
    assert any("bounds of the derivatives" in message for message in messages)


def test_memory_of_products():
    """Of 40 products 160 densities are made. They count, and are refused before there is any of them."""
    mol = molecule(WATER, "cc-pvdz")
    left, right = np.random.default_rng(0).normal(size=(2, 40, mol.nao, mol.nao))

    def work(cap):
        return md4.JK(mol, backend="cpu", max_memory=cap).product_gradient(left, right)

    found, _, refusals = until_enough(work, 0.5)
    assert abs(found - work(None)).max() < 1e-12
    assert refusals[0].startswith("160 density matrices of 24 AOs")


# arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, message", [
    (lambda jk, d: jk.gradient(d[:3]), "shape"),
    (lambda jk, d: jk.gradient([d] * 3), "alpha and beta.*not 3; see product_gradient"),
    (lambda jk, d: jk.gradient(d + np.eye(len(d), k=1)), "symmetric density matrices; see product_gradient"),
    (lambda jk, d: jk.gradient(d + 1j * d), "real density matrices"),
    (lambda jk, d: jk.gradient(d * np.nan), "finite"),
    (lambda jk, d: jk.gradient(d, coulomb="all"), "coulomb"),
    (lambda jk, d: jk.gradient(d, exchange=np.inf), "exchange"),
    (lambda jk, d: jk.gradient(d, omega=np.nan), "omega must be a finite real number, not nan"),
    (lambda jk, d: jk.gradient(d, tolerance=-1e-12), "tolerance"),
    (lambda jk, d: jk.gradient(d, long_range=0.3), "long_range must be a pair"),
    (lambda jk, d: jk.gradient(d, long_range=(-0.3, 1.0)), "omega of long_range must be"),
    (lambda jk, d: jk.gradient(d, long_range=(1e-300, 1.0)), "positive"),
    (lambda jk, d: jk.gradient(d, omega=-1e300), "modulus of omega"),
    (lambda jk, d: jk.gradient(d, long_range=(0.3, np.inf)), "factor of long_range"),
    (lambda jk, d: jk.gradient(d, exchange=None, long_range=(0.3, 1.0)), "exchange"),
    (lambda jk, d: jk.gradient(d, tolerance=np.nan), "tolerance"),
    (lambda jk, d: jk.product_gradient(d, [d, d]), "left and right must have the same shape"),
    (lambda jk, d: jk.product_gradient([d, d], coulomb=[1, 2, 3]), "coulomb must be a number or 2 numbers"),
    (lambda jk, d: jk.product_gradient(d, exchange=np.nan), "exchange"),
    (lambda jk, d: jk.product_gradient(d, 1j * d), "real density matrices"),
    (lambda jk, d: jk.product_gradient(1j * d, d), "real density matrices"),
    (lambda jk, d: jk.derivative_jk(1j * d), "real density matrices"),
    (lambda jk, d: jk.derivative_jk(d, hermi=3), "hermi"),
    (lambda jk, d: jk.derivative_jk(d, with_j="yes"), "with_j"),
    (lambda jk, d: jk.derivative_jk(d, tolerance=-1.0), "^tolerance must be"),
    (lambda jk, d: jk.derivative_jk(d[:, :2]), "shape"),
])  # fmt: skip
def test_arguments_that_cannot_be_used(mol, jk, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(jk, symmetric(mol.nao))


def test_too_high_angular_momentum():
    basis = Basis([Shell(8, [1.0], [[1.0]], CENTRES[0]), Shell(0, [1.0], [[1.0]], CENTRES[1])])
    jk, dm = md4.JK(basis, backend="cpu"), symmetric(basis.nao)
    for call in (jk.gradient, jk.product_gradient, jk.derivative_jk):
        with pytest.raises(UnsupportedError, match="L = 32, beyond the limit of 31 for derivatives"):
            call(dm)


def test_the_reference_is_that_of_pyscf_s_gradients():
    """`nuclear_forces` contracts as PySCF's gradients do."""
    mol = molecule(MIXED, {**SHELLS, "C": [[0, [1.0, 1.0]]]})
    mf = solver("RHF", mol)
    dm = symmetric(mol.nao)
    vhf = grad.RHF(mf).get_veff(mol, dm)
    want = np.array([2 * np.einsum("xij,ij->x", vhf[:, a:b], dm[a:b]) for *_, a, b in mol.aoslice_by_atom()])
    assert abs(forces_by_pyscf(mol, dm) - want).max() < 1e-12
