"""J alone, in the Hermite basis: against the digestion's J and PySCF's on both backends."""

import numpy as np
import pytest
from densities import BENZENE, CHAIN, HERMITICITY, random_densities
from molecules import METHANE, WATER, molecule
from pyscf import scf
from traced_memory import until_enough

import md4
from md4.errors import MemoryLimitError
from md4.method.angular import hermite_triples
from md4.method.hermite_coulomb import signs

TOLERANCE = 1e-10  # largest error of an element, relative to the largest element or to 1


def check(ours, reference):
    assert ours.shape == reference.shape
    assert abs(ours - reference).max() < TOLERANCE * max(1.0, abs(reference).max())


def check_both(mol, backend, hermi=1, count=1, omega=0.0):
    """Against the digestion and, but for erfc, PySCF, whose own is good to 1e-10 only."""
    dm = random_densities(mol, hermi, count)
    jk = md4.JK(mol, backend=backend)
    ours, none = jk.get_jk(dm, hermi, with_k=False, omega=omega)
    assert none is None
    check(ours, jk.get_jk(dm, hermi, omega=omega)[0])
    if omega >= 0 and hermi != 2:
        with mol.with_range_coulomb(omega):
            check(ours, scf.hf.dot_eri_dm(mol.intor("int2e", aosym="s8"), dm, hermi, with_k=False)[0])
    return jk


@pytest.mark.parametrize("hermi", HERMITICITY)
@pytest.mark.parametrize("cart", [False, True], ids=["spherical", "cartesian"])
def test_water(backend, hermi, cart):
    check_both(molecule(WATER, "cc-pvdz", cart=cart), backend, hermi, count=2)


@pytest.mark.parametrize("omega", [0.3, -0.3])
def test_range_separation(backend, omega):
    check_both(molecule(WATER, "6-31g*"), backend, 0, omega=omega)


def test_general_contraction(backend):
    check_both(molecule(METHANE, "roosdz"), backend, 0)


def test_higher_functions(backend):
    """L beyond what one thread takes."""
    mol = molecule("Sc 0 0 0; H 0 0 1.8", {"Sc": [[2, [1.3, 1.0]], [4, [0.9, 1.0]], [3, [1.1, 1.0]]], "H": "sto-3g"})
    check_both(mol, backend, 0, count=2)


def test_complex_density(backend):
    mol = molecule(WATER, "6-31g")
    real, imaginary = random_densities(mol, 1)[0], random_densities(mol, 2, seed=1)[0]
    jk = md4.JK(mol, backend=backend)
    check(jk.get_jk(real + 1j * imaginary, with_k=False)[0].real, jk.get_jk(real)[0])


def test_statistics(backend):
    """The survivors of J alone are the fewer; none is left out and counted."""
    mol = molecule(WATER, "6-31g")
    jk, dm = md4.JK(mol, backend=backend), random_densities(mol)
    jk.get_jk(dm)
    both = jk.stats
    jk.get_jk(dm, with_k=False)
    assert jk.stats.wanted <= both.wanted
    assert jk.stats.wanted + jk.stats.skipped == both.wanted + both.skipped
    assert jk.stats.computed >= jk.stats.wanted > 0


def test_screening_is_safe(backend):
    """The error of an element stays below the tolerance times the quartets that it takes a part of."""
    dm, tolerance = random_densities(CHAIN), 1e-7
    loose, exact = md4.JK(CHAIN, backend=backend, direct_scf_tol=tolerance), md4.JK(CHAIN, backend=backend)
    ours, reference = (jk.get_jk(dm, with_k=False)[0] for jk in (loose, exact))
    assert 0 < abs(ours - reference).max() <= tolerance * CHAIN.nbas**2
    assert loose.stats.wanted < exact.stats.wanted


def test_little_memory(backend):
    """H matrices that do not fit are made anew, r comes in small chunks; the result is the same."""
    mol = molecule(WATER, "cc-pvdz")
    dm = random_densities(mol)
    jk = md4.JK(mol, backend=backend, max_memory=6)
    check(jk.get_jk(dm, with_k=False)[0], md4.get_jk(mol, dm, with_k=False, backend=backend)[0])
    if backend == "cuda":
        assert jk.engine.backend.context.pool.peak <= 6e6


def test_copies_of_many_densities_are_small():
    """NumPy copies what is chosen of an array: of one density after the other."""
    places = (f"O {3 * n} 0 0; H {3 * n} 0.757 0.587; H {3 * n} -0.757 0.587" for n in range(4))
    mol = molecule("; ".join(places), "6-31g")
    dm = random_densities(mol, count=12)

    def work(cap):
        return md4.get_jk(mol, dm, with_k=False, backend="cpu", max_memory=cap)[0]

    found, *_ = until_enough(work, 1.0)
    np.testing.assert_allclose(found, work(None), rtol=0, atol=1e-12)


def test_too_little_memory_is_refused(backend):
    mol = molecule(WATER, "cc-pvdz")
    with pytest.raises(MemoryLimitError, match="raise max_memory"):
        md4.get_jk(mol, random_densities(mol, count=20), with_k=False, backend=backend, max_memory=0.5)


def test_signs():
    assert signs(3).tolist() == [(-1.0) ** t.sum() for t in hermite_triples(3)]


# GPU ------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("basis", ["cc-pvqz", "cc-pv5z"])
def test_large_bases(gpu, basis):
    mol = molecule(WATER, basis, cart=basis == "cc-pvqz")
    dm = random_densities(mol, 0)
    check(*(md4.get_jk(mol, dm, 0, with_k=False, backend=b)[0] for b in ("cuda", "cpu")))


@pytest.mark.gpu
def test_benzene(gpu):
    check_both(molecule(BENZENE, "cc-pvtz"), "cuda")


@pytest.mark.gpu
def test_the_same_bits(gpu):
    """In each build, and by a second object."""
    mol = molecule(BENZENE, "cc-pvtz")
    dm, jk = random_densities(mol, 0), md4.JK(mol, backend="cuda")
    found = jk.get_jk(dm, hermi=0, with_k=False)[0]
    for this in (jk, md4.JK(mol, backend="cuda")):
        np.testing.assert_array_equal(this.get_jk(dm, hermi=0, with_k=False)[0], found)
