"""Mean-field objects of PySCF with md4's J and K: the same matrices, and the same energies in the same cycles."""


import numpy as np
import pytest
from molecules import HYDROGEN_FLUORIDE, WATER, molecule
from places import EXAMPLES
from pyscf import scf
from solvers import assert_same, density, solver

import md4

FORMALDEHYDE = "C 0 0 -0.5296; O 0 0 0.6741; H 0 0.9376 -1.1159; H 0 -0.9376 -1.1159"
OXYGEN = "O 0 0 0; O 0 0 1.208"
def same_scf(mf, backend="cpu"):
    """Runs PySCF's `mf` and a copy with md4, and compares; returns both. All builds of md4 are direct."""
    ours = md4.attach(mf.copy(), backend=backend)
    ours._is_mem_enough = lambda: False
    mf.kernel()
    ours.kernel()
    assert mf.converged
    assert ours.converged
    assert abs(ours.e_tot - mf.e_tot) < 1e-8
    assert ours.cycles == mf.cycles
    assert ours._eri is None
    return ours, mf


# whole calculations ---------------------------------------------------------------------------------------------------

MOLECULES = {
    "H2O": (WATER, 0, 0), "H2O+": (WATER, 1, 1), "HF": (HYDROGEN_FLUORIDE, 0, 0), "O2": (OXYGEN, 0, 2),
    "CH2O": (FORMALDEHYDE, 0, 0), "O": ("O 0 0 0", 0, 2),
}  # fmt: skip
SMALL = [
    "RHF H2O cc-pvdz", "UHF H2O+ cc-pvdz", "ROHF H2O+ cc-pvdz", "GHF H2O+ cc-pvdz", "UHF O2 6-31g*",
    "UHF O aug-cc-pvdz",
    "RKS CH2O 6-31g* b3lyp", "RKS CH2O 6-31g* wb97x",
    "RKS H2O 6-31g pbe", "RKS H2O 6-31g hse06", "RKS H2O 6-31g lc_blyp",
    "UKS H2O+ 6-31g wb97x", "ROKS H2O+ 6-31g b3lyp", "GKS H2O+ 6-31g hse06",
]  # fmt: skip
LARGE = [
    "RHF H2O cc-pv5z", "RHF HF cc-pv6z", "UHF O2 aug-cc-pvqz", "UHF O aug-cc-pv6z",
    "RKS CH2O cc-pvtz b3lyp", "RKS CH2O cc-pvtz wb97x",
]  # fmt: skip


def named_solver(name, grid=0):
    """A solver from 'KIND MOLECULE BASIS [FUNCTIONAL]'."""
    kind, formula, basis, *xc = name.split()
    atom, charge, spin = MOLECULES[formula]
    return solver(kind, molecule(atom, basis, charge=charge, spin=spin), *xc, grid=grid)


@pytest.mark.parametrize("name", SMALL)
def test_energy(name, backend):
    """Functionals: none, pure, hybrid, and exchange of short range, of long range, and of both."""
    same_scf(named_solver(name), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_energy_large(name, gpu):
    same_scf(named_solver(name, grid=3), "cuda")


@pytest.mark.gpu
@pytest.mark.slow
def test_energy_benzene(gpu):
    xyz = EXAMPLES / "benzene.xyz"
    same_scf(solver("RHF", molecule(xyz.read_text().split("\n", 2)[2], "cc-pvtz")), "cuda")


@pytest.mark.gpu
@pytest.mark.slow
def test_oxygen_k_functions(gpu):
    """Beyond libcint's accuracy: tightly converged, and a little below the next smaller basis set."""
    energies = {}
    for basis in ("aug-cc-pv6z", "aug-cc-pv7z"):
        mf = md4.attach(named_solver(f"UHF O {basis}").set(conv_tol=1e-12, direct_scf_tol=1e-15), backend="cuda")
        energies[basis] = mf.kernel()
        assert mf.converged
        print(f"O, UHF triplet, {basis}: {energies[basis]:.10f} Hartree")
    assert 0 < energies["aug-cc-pv6z"] - energies["aug-cc-pv7z"] < 1e-3


def test_energy_complex(cation):
    """GHF with spin-orbit coupling: complex orbitals."""
    ours, _ = same_scf(solver("GHF", cation).x2c1e())
    assert abs(ours.mo_coeff.imag).max() > 1e-3


def test_energy_of_scalar_x2c(water):
    """What the refusal of two-component objects recommends."""
    same_scf(solver("RHF", water).x2c())
    same_scf(solver("RHF", water).x2c1e())


def test_energy_symmetry_and_cartesian():
    mol = molecule(WATER, "6-31g*", symmetry=True, cart=True)
    same_scf(solver("RHF", mol))


def test_energy_without_direct_scf(water):
    same_scf(solver("RHF", water, direct_scf=False))


def test_energy_empty_spin():
    """A density matrix that is zero; scf.UHF would give one electron a class that needs no J and K."""
    same_scf(scf.uhf.UHF(molecule("H 0 0 0", "cc-pvtz")))


# J and K --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("complex_", [False, True])
@pytest.mark.parametrize("hermi", [0, 1, 2])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_get_jk(rhf, water, hermi, shape, complex_):
    n = water.nao
    dm = density(n, hermi, complex_, shape)
    if hermi != 1:
        dm = np.triu(dm)
    if hermi == 2:
        dm = dm - dm.conj().swapaxes(-1, -2)
    assert_same(rhf.get_jk(water, dm, hermi), scf.hf.dot_eri_dm(water.intor("int2e"), dm, hermi))


@pytest.mark.parametrize("complex_", [False, True])
@pytest.mark.parametrize("hermi", [0, 1])
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_get_jk_ghf(water, complex_, hermi, which, shape):
    dm = density(2 * water.nao, 1, complex_, shape)
    if hermi == 0:
        dm = np.triu(dm)
    ours, theirs = md4.attach(scf.GHF(water), backend="cpu"), scf.GHF(water)
    found = ours.get_jk(water, dm, hermi, *which)
    jk = theirs.get_jk(water, dm, 0)  # with all blocks; PySCF's J alone takes them for symmetric
    assert_same(found, [x if wanted else None for x, wanted in zip(jk, which)])


def test_j_and_k_alone(rhf, water):
    dm = density(water.nao)
    vj, vk = rhf.get_jk(water, dm)
    assert abs(rhf.get_j(water, dm) - vj).max() < 1e-12  # made another way, without K
    assert np.array_equal(rhf.get_k(water, dm), vk)


def test_density_of_wrong_shape(rhf, water):
    with pytest.raises(md4.ArgumentError, match="has shape"):
        rhf.get_jk(water, np.zeros((2, 2)))


@pytest.mark.parametrize("omega", [0.3, -0.3, 0.0])
def test_omega(rhf, water, omega):
    """An argument, mol.omega, or with_range_coulomb; zero is the full operator, whatever mol says."""
    dm = density(water.nao)
    with water.with_range_coulomb(omega):
        theirs = scf.hf.dot_eri_dm(water.intor("int2e"), dm)
        assert_same(rhf.get_jk(water, dm), theirs)
    assert_same(rhf.get_jk(water, dm, omega=omega), theirs)
    attenuated = water.copy().set(omega=0.7)
    mine = md4.attach(scf.RHF(attenuated), backend="cpu")
    assert_same(mine.get_jk(dm=dm, omega=omega), theirs)
    assert abs(mine.get_jk(dm=dm)[0] - theirs[0]).max() > 1e-3


def test_differences(rhf, water):
    """get_veff from a difference of densities is that of the whole density, and screens by the difference."""
    rhf.max_memory, first, second = 0, density(water.nao), density(water.nao, 1)
    last = rhf.get_veff(water, first)
    step = rhf.get_veff(water, second, first, last)
    whole = rhf.get_veff(water, second)
    assert abs(step - whole).max() < 1e-10
    assert abs(step.ecoul - whole.ecoul) < 1e-9


@pytest.mark.parametrize("direct", [True, False])
def test_builds_from_differences(water, direct, monkeypatch):
    """PySCF hands over ever smaller changes of the density, unless direct_scf is off; they are what screens."""
    from md4.contract.fock import JK

    sizes, get_jk = [], JK.get_jk

    def recorded(self, dm, *args, **kwargs):
        sizes.append(abs(dm).max())
        return get_jk(self, dm, *args, **kwargs)

    monkeypatch.setattr(JK, "get_jk", recorded)
    mf = md4.attach(scf.RHF(water).set(direct_scf=direct, max_memory=0), backend="cpu")
    mf.kernel()
    assert (sizes[-1] < 1e-3 * sizes[0]) == direct


def test_results_are_the_callers(rhf, water):
    """PySCF adds to them in place."""
    dm = density(water.nao)
    vj, vk = rhf.get_jk(water, dm)
    want = vj.copy(), vk.copy()
    vj += 1
    vk *= 2
    assert_same(rhf.get_jk(water, dm), want)


def test_direct_scf_tol(rhf, water, monkeypatch):
    from md4.contract.fock import JK

    seen, get_jk = [], JK.get_jk

    def recorded(self, dm, hermi=1, with_j=True, with_k=True, omega=None, direct_scf_tol=None):
        seen.append(direct_scf_tol)
        return get_jk(self, dm, hermi, with_j, with_k, omega, direct_scf_tol)

    monkeypatch.setattr(JK, "get_jk", recorded)
    rhf.direct_scf_tol, rhf.max_memory = 1e-9, 0
    rhf.get_jk(water, density(water.nao))
    assert seen == [1e-9]
