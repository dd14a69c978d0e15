"""`FittingGradient`: against derivatives of integrals by PySCF and against differences of md4's own energies."""

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy
from molecules import molecule
from nuclear_forces import MIXED, WATER, few, mixed, rows_of_atoms, symmetric
from pyscf import df

import md4
from md4.contract import fitting_gradient
from md4.contract.density_fitting import DensityFitting
from md4.contract.fitting_force_team import gradient_of
from md4.contract.fitting_gradient import FittingGradient
from md4.contract.fitting_lists import forces_of
from md4.contract.metric import LeftOut
from md4.contract.ranks import Alone
from md4.cpu.algebra import HostAlgebra
from md4.errors import MemoryLimitError, UnsupportedError
from md4.gpu.algebra import DeviceAlgebra

CLOSE = 1e-10  # Hartree/Bohr, relative to the largest component where that is above 1
# Functions s to h, general contractions, and a ghost with functions.
AUXILIARY = {
    "O": [[0, [8.0, 0.3, 0.1], [2.0, 0.5, -0.2], [0.5, 0.4, 0.9]], [1, [1.5, 1.0]], [2, [1.1, 1.0], [0.5, 0.7]],
          [5, [1.3, 1.0]]],
    "H": [[0, [1.2, 1, 0], [0.4, 0, 1]], [1, [0.8, 1.0]], [4, [0.9, 1.0]]],
    "ghost-He": [[0, [0.7, 1.0]], [3, [0.6, 1.0]]],
}  # fmt: skip


def fitting(mol, auxmol, omega=0.0, backend="cpu", **options):
    bases = md4.Basis.from_mol(mol), md4.Basis.from_mol(auxmol)
    return DensityFitting(*bases, md4.Operator.from_omega(omega), backend, **options)


def of_atoms(mol, auxmol, made, found):
    """Sums over the shells of each atom, shape (natm, 3), of what `FittingGradient.run` has found."""
    forces = np.zeros((mol.natm, 3))
    for this, of_shells, basis in zip((mol, auxmol), found, made.three.basis.parts):
        ends = this.aoslice_by_atom()[:, 3]
        np.add.at(forces, np.searchsorted(ends, basis.ao_loc[:-1], side="right"), of_shells)
    return forces


def tensors(mol, auxmol, omega):
    """(ij|P), (P|Q), and their derivatives by PySCF; erfc as Coulomb minus erf."""
    if omega < 0:
        return tuple(a - b for a, b in zip(tensors(mol, auxmol, 0.0), tensors(mol, auxmol, -omega)))
    with mol.with_range_coulomb(omega), auxmol.with_range_coulomb(omega):
        three = (df.incore.aux_e2(mol, auxmol, name) for name in ("int3c2e", "int3c2e_ip1", "int3c2e_ip2"))
        return *three, auxmol.intor("int2c2e"), auxmol.intor("int2c2e_ip1")


def by_tensors(mol, auxmol, dm, coulomb, exchange, omega, response):
    """The gradient by whole tensors, shape (natm, 3)."""
    three, by_a, by_p, two, of_two = tensors(mol, auxmol, omega)
    spins = np.asarray(dm).reshape(-1, *three.shape[:2])
    fitted = np.linalg.solve(two, three.reshape(-1, len(two)).T).reshape(-1, *spins.shape[1:])
    c = np.einsum("Pij,ij->P", fitted, spins.sum(axis=0))
    factor = exchange / 2 if len(spins) == 1 else exchange
    turned = np.einsum("sij,Pjk,skl->Pil", spins, fitted, spins, optimize=True)
    of_three = coulomb * np.einsum("ij,P->ijP", spins.sum(axis=0), c) - factor * turned.transpose(1, 2, 0)
    of_metric = -0.5 * coulomb * np.outer(c, c) + 0.5 * factor * np.einsum("Pij,Qij->PQ", turned, fitted)
    found = rows_of_atoms(mol, -2 * np.einsum("xijP,ijP->xi", by_a, of_three))
    if response:
        of_aux = np.einsum("xijP,ijP->xP", by_p, of_three) + 2 * np.einsum("xPQ,PQ->xP", of_two, of_metric)
        found -= rows_of_atoms(auxmol, of_aux)
    return found


@pytest.mark.parametrize("omega", [0.0, 0.6, -0.3])
@pytest.mark.parametrize("count", [None, 2], ids=["closed shell", "two spins"])
@pytest.mark.parametrize("coulomb, exchange, response", [
    (1.0, 1.0, True), (1.0, 0.0, True), (0.0, 0.7, True), (-0.4, 2.5, False), (0.0, 0.0, True),
])  # fmt: skip
def test_gradient(coulomb, exchange, response, count, omega):
    """With an atom without functions; a random density has no few orbitals, and eigenvalues of both signs."""
    mol, auxmol = mixed(), molecule(MIXED, AUXILIARY)
    made, dm = fitting(mol, auxmol, omega), symmetric(mol.nao, count)
    assert made.metric.how == "Cholesky"
    found = of_atoms(mol, auxmol, made, FittingGradient(made).run(dm, coulomb, exchange, response=response))
    want = by_tensors(mol, auxmol, dm, coulomb, exchange, omega, response)
    assert abs(found - want).max() < CLOSE * max(1.0, abs(want).max())
    if response:
        assert abs(found.sum(axis=0)).max() <= 1e-12 * abs(found).max()


def test_cartesian_functions():
    mol, auxmol = mixed(cart=True), molecule(MIXED, AUXILIARY, cart=True)
    made, dm = fitting(mol, auxmol), symmetric(mol.nao)
    found = of_atoms(mol, auxmol, made, FittingGradient(made).run(dm, 1.0, 1.0))
    want = by_tensors(mol, auxmol, dm, 1.0, 1.0, 0.0, True)
    assert abs(found - want).max() < CLOSE * abs(want).max()


def test_a_cutoff_that_leaves_out_all_pairs():
    """Then J, K and their gradient are zero."""
    mol, auxmol = molecule(HYDROXYL, LITTLE), molecule(HYDROXYL, LITTLE_AUX)
    made = fitting(mol, auxmol, cutoff=1e9)
    assert made.three.ncol == 0
    assert not np.any(made.get_jk(symmetric(mol.nao)))
    found = FittingGradient(made).run(symmetric(mol.nao), 1.0, 0.7)
    assert [this.shape for this in found] == [(mol.nbas, 3), (auxmol.nbas, 3)]
    assert not any(this.any() for this in found)


def test_too_high_functions():
    """(kk|s) and (0|ab) are made, their derivatives are not."""
    mol, auxmol = (molecule("He 0 0 0", {"He": [[l, [1.0, 1.0]]]}) for l in (8, 15))
    with pytest.raises(UnsupportedError, match="31"):
        FittingGradient(fitting(mol, auxmol, store="direct", cutoff=0.0))


# differences of energies ----------------------------------------------------------------------------------------------


def energy_and_gradient(geometry, omega, auxbasis, dm, exchange):
    """Of a water molecule with the density of another geometry; and how the metric was factorised."""
    mol = molecule(WATER, "6-31g").set_geom_(geometry, unit="Bohr")
    auxmol = df.make_auxmol(mol, df.aug_etb(mol, beta=auxbasis) if isinstance(auxbasis, float) else auxbasis)
    made = fitting(mol, auxmol, omega)
    vj, vk = made.get_jk(dm)
    return 0.5 * (dm * vj).sum() - 0.25 * exchange * (dm * vk).sum(), made, (mol, auxmol)


@pytest.mark.parametrize("omega, auxbasis, how", [
    (0.0, "def2-universal-jkfit", "Cholesky"), (-0.3, "def2-universal-jkfit", "Cholesky"),
    (0.33, "def2-universal-jkfit", "eigenvectors"), (0.4, "cc-pvdz-jkfit", "eigenvectors"), (0.0, 1.25, "eigenvectors"),
])  # fmt: skip
def test_differences_of_energies(omega, auxbasis, how, monkeypatch):
    """Also where eigenvectors are left out, whose turning PySCF leaves out.

    Both kinds of the error of differences, of their order and by rounding, are below 1e-10. Without the turning of
    eigenvectors the gradient is wrong by more than 1e-9. It is chance if such a metric has a Cholesky factor.
    """
    if how == "eigenvectors":
        monkeypatch.setattr(HostAlgebra, "cholesky", lambda *args: None)
    mol = molecule(WATER, "6-31g")
    dm, (atom, axis), step = mol.RHF().run().make_rdm1(), (0, 2), 2e-3

    def energy(shift):
        geometry = mol.atom_coords()
        geometry[atom, axis] += shift
        return energy_and_gradient(geometry, omega, auxbasis, dm, 0.7)[0]

    one, half = ((energy(h) - energy(-h)) / (2 * h) for h in (step, step / 2))
    want = (4 * half - one) / 3
    _, made, mols = energy_and_gradient(mol.atom_coords(), omega, auxbasis, dm, 0.7)
    assert made.metric.how == how
    found = of_atoms(*mols, made, FittingGradient(made).run(dm, 1.0, 0.7))
    assert abs(found[atom, axis] - want) < 5e-10
    assert abs(found.sum(axis=0)).max() < 1e-11
    monkeypatch.setattr(FittingGradient, "turned", lambda *args: 0.0)
    without = of_atoms(*mols, made, FittingGradient(made).run(dm, 1.0, 0.7))
    assert (abs(without - found).max() > 1e-9) == (how == "eigenvectors")


def test_turning_of_eigenvectors_with_several_densities(monkeypatch):
    """Its part of J has the factor of each density: it is once there for two spins, whose densities have none."""
    monkeypatch.setattr(HostAlgebra, "cholesky", lambda *args: None)
    mol = molecule(WATER, "6-31g")
    auxmol, dm = df.make_auxmol(mol, "cc-pvdz-jkfit"), symmetric(mol.nao)
    gradient = FittingGradient(fitting(mol, auxmol, 0.4))

    def run(dm, *factors):
        return of_atoms(mol, auxmol, gradient.fitting, gradient.run(dm, *factors))

    one = run(dm, 0.6, 0.7)
    assert abs(run(np.stack([dm / 2, dm / 2]), 0.6, 0.7) - one).max() < 1e-12 * abs(one).max()
    assert abs(0.6 * run(dm, 1.0, 0.0) + run(dm, 0.0, 0.7) - one).max() < 1e-12 * abs(one).max()


def test_eigenvectors_that_are_left_out(monkeypatch):
    """They and those that stay are all, with the eigenvalues of both."""
    monkeypatch.setattr(HostAlgebra, "cholesky", lambda *args: None)
    mol = molecule(WATER, "6-31g")
    made = fitting(mol, df.make_auxmol(mol, "cc-pvdz-jkfit"), 0.33)
    with made.working():
        others, kept = FittingGradient(made).left_out().metric, made.metric
    assert isinstance(others, LeftOut)
    assert others.size + kept.size == kept.naux
    assert others.values[others.size - 1] <= 1e-7 < others.values[others.size]
    rows = np.concatenate([others.vectors, kept.vectors * np.sqrt(others.values[others.size :, None])])
    assert abs(rows @ rows.T - np.eye(len(rows))).max() < 1e-12
    metric = made.sorted_metric()
    assert abs(others.vectors @ metric @ others.vectors.T).max() <= 1e-7
    assert abs(others.apply(metric.copy()) - others.vectors @ metric).max() < 1e-15


# memory and parts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case():
    mol = molecule(WATER, "cc-pvdz")
    auxmol = df.make_auxmol(mol, "cc-pvdz-jkfit")
    dm = symmetric(mol.nao, 2)
    return mol, auxmol, dm, FittingGradient(fitting(mol, auxmol)).run(dm, 1.0, 0.7)


def assert_same(found, want):
    largest = max(abs(this).max() for this in want)
    for a, b in zip(found, want, strict=True):
        assert abs(a - b).max() < 1e-12 * largest


def test_blocks_of_auxiliary_shells(case, monkeypatch):
    mol, auxmol, dm, want = case
    made = FittingGradient(fitting(mol, auxmol))
    assert len(made.pieces()[0]) == 1
    monkeypatch.setattr("md4.contract.fitting_gradient.BLOCK_SHARE", 1e-9)
    assert len(made.pieces()[0]) == auxmol.nbas  # one shell a block
    assert_same(made.run(dm, 1.0, 0.7), want)


@pytest.mark.parametrize("store", ["device", "host", "direct"])
def test_stores_and_little_memory(case, store):
    """It is refused with sizes, or enough; in either case what is allocated stays below the cap."""
    mol, auxmol, dm, want = case
    messages = []
    for cap in np.geomspace(0.6, 60, 30):
        try:
            made = fitting(mol, auxmol, store=store, max_memory=cap)
        except MemoryLimitError:
            continue
        try:
            found = FittingGradient(made).run(dm, 1.0, 0.7)
        except MemoryLimitError as error:
            messages.append(str(error))
        else:
            break
        assert made.engine.backend.memory.held <= made.engine.backend.memory.cap
    assert_same(found, want)
    assert any("pairs of occupied orbitals" in message for message in messages)
    assert all("may be used; raise max_memory" in message for message in messages)


@pytest.mark.parametrize("omega", [0.0, 0.33])
def test_parts_add_up(case, omega, monkeypatch):
    mol, auxmol, dm, _ = case
    made = FittingGradient(fitting(mol, auxmol, omega))
    want, found = made.run(dm, 1.0, 0.7), []
    for part, (threads, share) in enumerate(((1, 0.4), (5, 0.4), (2, 1e-9))):  # processes on unlike machines
        monkeypatch.setattr("md4.cpu.forces.number_of_threads", lambda threads=threads: threads)
        monkeypatch.setattr("md4.contract.fitting_gradient.BLOCK_SHARE", share)
        found.append(made.run(dm, 1.0, 0.7, part=part, parts=3))
    assert_same([sum(those) for those in zip(*found)], want)


def test_what_is_left_out_is_below_its_bounds(case, monkeypatch):
    """As far as `HostFittingForces` tells; the tolerance is that of each block of three centres."""
    mol, auxmol, dm, want = case
    made = FittingGradient(fitting(mol, auxmol))
    seen = []
    monkeypatch.setattr(fitting_gradient, "forces_of", lambda *given: seen.append(forces_of(*given)) or seen[-1])
    for tolerance in (10.0, 1.0):
        found = made.run(dm, 1.0, 0.7, tolerance=tolerance)
        error = max(abs(a - b).max() for a, b in zip(found, want))
        assert 0 < error < seen[-1].left_out[0]


# on a GPU -------------------------------------------------------------------------------------------------------------

LITTLE = {"O": [[1, [0.9, 1.0]]], "H": [[0, [1.2, 1.0]]]}
LITTLE_AUX = {"O": [[0, [2.0, 1.0]], [2, [1.1, 1.0]]], "H": [[0, [1.5, 1.0]], [1, [0.8, 1.0]]]}
HYDROXYL = "O 0 0.1 0; H 0.3 0.9 -0.6"


@pytest.mark.sample("*-device")
@pytest.mark.parametrize("count, how, store", [
    (None, "Cholesky", "device"), (2, "eigenvectors", "host"), (None, "eigenvectors", "direct"),
])  # fmt: skip
def test_on_the_emulated_gpu(count, how, store, monkeypatch):
    """As on the CPU, from rows of all stores; where eigenvectors are left out, they turn."""
    if how == "eigenvectors":
        for algebra in (HostAlgebra, DeviceAlgebra):
            monkeypatch.setattr(algebra, "cholesky", lambda *args: None)
        monkeypatch.setattr("md4.contract.metric.LINEAR_DEPENDENCE", 1.6)
    mol, auxmol = molecule(HYDROXYL, LITTLE), molecule(HYDROXYL, LITTLE_AUX)
    dm = symmetric(mol.nao, count)
    on_cpu = fitting(mol, auxmol)
    want = FittingGradient(on_cpu).run(dm, 1.0, 0.7)
    monkeypatch.setattr(fitting_gradient, "SQUARE_COLUMNS", 3)
    with running("dmma16") as machine, cupy():
        made = fitting(mol, auxmol, backend="cuda", store=store)
        found = FittingGradient(made).run(dm, 1.0, 0.7)
    assert (made.metric.how, made.size, made.store) == (how, on_cpu.size, store)
    assert (made.size < auxmol.nao) == (how == "eigenvectors")
    assert_same(found, want)
    assert {"table_norms", "pair_forces"} <= machine.kernels


def test_a_gpu_that_makes_no_forces():
    """The CPU makes them, without a table."""
    mol, auxmol = molecule(HYDROXYL, LITTLE), molecule(HYDROXYL, LITTLE_AUX)
    for unit, backend, store in (("fma", "cpu", "direct"), ("dmma8", "cuda", "device")):
        with running(unit), cupy():
            made = fitting(mol, auxmol, backend="cuda")
            found = gradient_of(made, Alone(), 0.0).fitting
            assert (found is made) == (backend == "cuda")
            assert (found.engine.backend.name, found.store) == (backend, store)


@pytest.mark.thorough
def test_little_memory_of_the_emulated_gpu():
    """It is refused, or enough. Of these caps the tensor is refused first."""
    mol, auxmol = molecule(HYDROXYL, LITTLE), molecule(HYDROXYL, LITTLE_AUX)
    dm, messages = symmetric(mol.nao), []
    want = FittingGradient(fitting(mol, auxmol)).run(dm, 1.0, 0.7)
    with running("dmma16"), cupy():
        for cap in np.geomspace(0.05, 30, 16):
            try:
                found = FittingGradient(fitting(mol, auxmol, backend="cuda", max_memory=cap)).run(dm, 1.0, 0.7)
            except MemoryLimitError as error:
                messages.append(str(error))
            else:
                break
    assert_same(found, want)
    assert messages
    assert all("raise max_memory" in message for message in messages)


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["device", "host", "direct"])
@pytest.mark.parametrize("omega", [0.0, 0.6, -0.3])
def test_on_a_gpu(omega, store):
    """As on the CPU: general contractions, s to h functions, densities without few orbitals."""
    mol, auxmol = mixed(), molecule(MIXED, AUXILIARY)
    if omega:
        mol, auxmol = few(), molecule(MIXED, {"O": AUXILIARY["O"][::3], "H": AUXILIARY["H"][:1]})
    assert_as_on_the_cpu(mol, auxmol, symmetric(mol.nao, 2), omega, store=store)


@pytest.mark.gpu
@pytest.mark.parametrize("basis, cart", [("cc-pvtz", False), ("cc-pvdz", True)])
def test_water_on_a_gpu(basis, cart):
    mol = molecule(WATER, basis, cart=cart)
    auxmol = df.make_auxmol(mol, f"{basis}-jkfit")
    mf = mol.RHF().run()
    for tolerance in (0.0, 1e-12):
        assert_as_on_the_cpu(mol, auxmol, mf.make_rdm1(), 0.0, [(mf.mo_coeff, mf.mo_occ)], tolerance)


def assert_as_on_the_cpu(mol, auxmol, dm, omega, orbitals=None, tolerance=0.0, **options):
    want = FittingGradient(fitting(mol, auxmol, omega)).run(dm, 1.0, 0.7, orbitals)
    made = fitting(mol, auxmol, omega, "cuda", **options)
    found = FittingGradient(made).run(dm, 1.0, 0.7, orbitals, tolerance=tolerance)
    largest = max(1.0, *(abs(this).max() for this in want))
    assert max(abs(a - b).max() for a, b in zip(found, want, strict=True)) < CLOSE * largest
