"""J and K against PySCF, on both backends, and what their screening promises."""

import gc
from unittest.mock import Mock

import numpy as np
import pytest
from densities import BENZENE, CHAIN, HERMITICITY, random_densities
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupted
from molecules import METHANE, WATER, host, joined, molecule
from pyscf import gto, scf
from traced_memory import until_enough

import md4
from md4.contract import fock
from md4.errors import ArgumentError, MemoryLimitError

TOLERANCE = 1e-9  # largest absolute error of an element


def theirs(mol, dm, hermi=1, omega=None):
    """PySCF's J and K; erfc as Coulomb minus erf, since libcint's own is good to 1e-10 only."""
    omega = mol.omega if omega is None else omega
    if omega < 0:
        return tuple(a - b for a, b in zip(theirs(mol, dm, hermi, 0.0), theirs(mol, dm, hermi, -omega)))
    with mol.with_range_coulomb(omega):
        return scf.hf.dot_eri_dm(mol.intor("int2e", aosym="s8"), dm, hermi)


def check(mol, backend, hermi=1, omega=None, count=1, dm=None):
    dm = random_densities(mol, hermi, count)[0 if count == 1 else slice(None)] if dm is None else dm
    jk = md4.JK(mol, backend=backend)
    ours = jk.get_jk(dm, hermi, omega=omega)
    for mine, reference in zip(ours, theirs(mol, dm, hermi, omega)):
        assert mine.shape == dm.shape
        assert abs(mine - (0 if hermi == 2 and mine is ours[0] else reference)).max() < TOLERANCE
    return jk


@pytest.mark.parametrize("hermi", [0, 1, 2])
@pytest.mark.parametrize("cart", [False, True], ids=["spherical", "cartesian"])
@pytest.mark.parametrize("omega", [0.0, 0.3, -0.3])
def test_water(backend, hermi, cart, omega):
    check(molecule(WATER, "cc-pvdz", cart=cart), backend, hermi, omega, count=2)


@pytest.mark.parametrize("count", [1, 5])
def test_one_and_many_densities(backend, count):
    check(molecule(WATER, "cc-pvtz"), backend, count=count)


def test_diffuse_anion(backend):
    check(molecule("O 0 0 0; H 0 0 0.96", "aug-cc-pvdz", charge=-1), backend, 0)


def test_general_contraction(backend):
    check(molecule(METHANE, "roosdz"), backend, 0)


def test_needless_zeros_of_general_contractions(backend):
    """All functions of one l in one shell, as the Basis Set Exchange gives them; J and K are over the split shells."""
    mol = molecule(WATER, joined("cc-pvtz", "OH"))
    assert mol.nbas < molecule(WATER, "cc-pvtz").nbas
    assert len(check(mol, backend, 0).basis) == molecule(WATER, "cc-pvtz").nbas


@pytest.mark.thorough
def test_transition_metal_complex(backend):
    """f and g functions on the metal."""
    mol = molecule("Sc 0 0 0; H 0 0 1.8; H 0 1.7 -0.6", {"Sc": "cc-pvtz", "H": "sto-3g"}, charge=1)
    assert {3, 4} <= {mol.bas_angular(i) for i in range(mol.nbas)}
    check(mol, backend)


def test_molecule_of_a_range_separated_operator(backend):
    mol = molecule(WATER, "cc-pvdz")
    mol.omega = 0.4
    check(mol, backend)


def test_complex_density(backend):
    mol = molecule(WATER, "6-31g")
    real, imaginary = random_densities(mol, 1)[0], random_densities(mol, 2, seed=1)[0]
    vj, vk = md4.get_jk(mol, real + 1j * imaginary, backend=backend)
    j, k = theirs(mol, real)
    assert abs(vj - j).max() < TOLERANCE
    assert abs(vk - (k + 1j * theirs(mol, imaginary, 2)[1])).max() < TOLERANCE


def test_only_one_of_both(backend):
    mol = molecule(WATER, "6-31g")
    dm = random_densities(mol)
    j, k = md4.get_jk(mol, dm, backend=backend)
    only_j, none = md4.get_jk(mol, dm, with_k=False, backend=backend)
    assert none is None
    assert abs(only_j - j).max() < 1e-12
    none, only_k = md4.get_jk(mol, dm, with_j=False, backend=backend)
    assert none is None
    assert abs(only_k - k).max() < 1e-12


def test_reproducible(backend):
    mol = molecule(WATER, "cc-pvtz")
    jk, dm = md4.JK(mol, backend=backend), random_densities(mol)
    first = jk.get_jk(dm)
    for again in (jk.get_jk(dm), md4.get_jk(mol, dm, backend=backend)):
        assert max(abs(a - b).max() for a, b in zip(first, again)) < 1e-12


def test_plain_arrays_without_pyscf(backend):
    mol = molecule(WATER, "6-31g*")
    dm = random_densities(mol)
    ours = md4.JK(md4.Basis.from_mol(mol), backend=backend).get_jk(dm)
    assert max(abs(a - b).max() for a, b in zip(ours, theirs(mol, dm))) < TOLERANCE


def test_density_difference(backend):
    """`update` sums differences; a small one computes fewer quartets."""
    mol = gto.M(atom=[f"He 0 0 {3 * k}" for k in range(8)], basis="6-31g", verbose=0)
    jk, dm = md4.JK(mol, backend=backend), random_densities(mol)[0]
    jk.update(dm)
    first, change = jk.stats, 1e-6 * random_densities(mol, seed=1)[0]
    ours = jk.update(dm + change)
    assert jk.stats.wanted < first.wanted
    assert max(abs(a - b).max() for a, b in zip(ours, theirs(mol, dm + change))) < TOLERANCE


def test_update_with_other_options(backend):
    """It starts from zero: the last J and K may be those of another operator, or not be there."""
    mol = molecule(WATER, "6-31g").copy()
    jk, dm = md4.JK(mol, backend=backend), random_densities(mol)[0]
    for options in ({}, {"omega": 0.3}, {"with_j": False}, {"with_k": False}, {"hermi": 0}, {}):
        for mine, right in zip(jk.update(dm, **options), jk.get_jk(dm, **options)):
            assert (mine is None) == (right is None)
            assert mine is None or abs(mine - right).max() < TOLERANCE
    mol.omega = 0.3
    assert max(abs(a - b).max() for a, b in zip(jk.update(dm), theirs(mol, dm))) < TOLERANCE


def test_an_interrupted_reset_leaves_one_molecule_or_the_other():
    """At any line: all that the object knows is of the same molecule, also the density of which `update` makes use."""
    one, two = (molecule(f"H 0 0 0; H 0 0 {r}", "6-31g") for r in (0.7, 0.9))
    dm = random_densities(one)[0]
    right = {mol: md4.get_jk(mol, dm, backend="cpu")[0] for mol in (one, two)}
    jk, number, found = md4.JK(one, backend="cpu"), 0, []
    while True:
        jk.update(dm)
        other = two if jk.mol is one else one
        if not interrupted(lambda mol=other: jk.reset(mol), fock.__file__, number):
            break
        found.append(jk.mol)
        assert abs(jk.update(dm)[0] - right[jk.mol]).max() < 1e-12
        number += 1
    assert jk.mol is other
    assert len(found) > 20


def test_results_of_update_are_the_callers(backend):
    mol = molecule(WATER, "6-31g")
    jk, dm = md4.JK(mol, backend=backend), random_densities(mol)
    for factor in (1.0, 0.9, 0.8):
        density = factor * dm
        vj, vk = jk.update(density)
        assert max(abs(a - b).max() for a, b in zip((vj, vk), theirs(mol, factor * dm))) < TOLERANCE
        density *= np.nan
        vj *= np.nan
        vk *= np.nan


def test_a_molecule_that_is_moved_in_place(backend):
    """Builds and `reset` are those of its geometry; `update` starts from zero."""
    mol = molecule(WATER, "6-31g").copy()
    jk, dm = md4.JK(mol, backend=backend), random_densities(mol)
    for build in (jk.get_jk, jk.update):
        build(dm)
        mol.set_geom_(mol.atom_coords() * 1.2, unit="Bohr")
        assert max(abs(a - b).max() for a, b in zip(build(dm), theirs(mol, dm))) < TOLERANCE
    mol.set_geom_("He 0 0 0; H 0 0 1; H 0 1 0")  # with fewer functions
    jk.reset()
    assert jk.basis.nao == mol.nao


def test_new_molecule(backend):
    one, two = molecule(WATER, "6-31g"), molecule("N 0 0 0; N 0 0 1.1", "cc-pvdz")
    jk = md4.JK(one, backend=backend)
    jk.get_jk(random_densities(one))
    jk.reset(two)
    dm = random_densities(two)
    assert max(abs(a - b).max() for a, b in zip(jk.get_jk(dm), theirs(two, dm))) < TOLERANCE


# screening ------------------------------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(4, 11), hermi=st.sampled_from([0, 1, 2]))
def test_screening_is_safe(seed, power, hermi):
    """The error of an element stays below the tolerance times the quartets that it takes a part of."""
    rng = np.random.default_rng(seed)
    mol = CHAIN.set_geom_(CHAIN.atom_coords() + rng.normal(scale=0.3, size=(CHAIN.natm, 3)), unit="Bohr", inplace=False)
    decay = np.exp(-rng.uniform(0, 1) * np.subtract.outer(*[np.arange(mol.nao)] * 2) ** 2)
    dm = HERMITICITY[hermi](rng.normal(size=(mol.nao, mol.nao)) * decay)
    jk, tolerance = md4.JK(mol, backend="cpu", direct_scf_tol=10.0**-power), 10.0**-power
    ours, exact = jk.get_jk(dm, hermi), md4.get_jk(mol, dm, hermi, backend="cpu", direct_scf_tol=1e-18)
    for mine, reference in zip(ours, exact):
        assert abs(mine - reference).max() <= tolerance * mol.nbas**2


def test_screening_skips():
    """The other half of the bargain: a loose tolerance computes much less."""
    dm = random_densities(CHAIN)
    jk = md4.JK(CHAIN, backend="cpu", direct_scf_tol=1e-13)
    jk.get_jk(dm)
    tight = jk.stats
    jk.get_jk(dm, direct_scf_tol=1e-6)
    total = CHAIN.nbas * (CHAIN.nbas + 1) // 2
    assert jk.stats.wanted < 0.8 * tight.wanted
    assert tight.wanted + tight.skipped == total * (total + 1) // 2


def test_tighter_tolerance_than_the_constructor():
    mol = molecule(WATER, "6-31g")
    jk, dm = md4.JK(mol, backend="cpu", direct_scf_tol=1e-3), random_densities(mol)
    ours = jk.get_jk(dm, direct_scf_tol=1e-13)
    assert max(abs(a - b).max() for a, b in zip(ours, theirs(mol, dm))) < TOLERANCE
    assert jk.direct_scf_tol == 1e-3  # of one build alone


def test_an_interrupt_where_lists_are_forgotten(monkeypatch):
    """Lists of a loose tolerance do not serve a tighter one later."""
    mol = molecule(WATER, "6-31g")
    jk, dm = md4.JK(mol, backend="cpu", direct_scf_tol=1e-1), random_densities(mol)
    jk.get_jk(dm)
    with monkeypatch.context() as patched:
        patched.setattr(jk.team, "forget", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            jk.get_jk(dm, direct_scf_tol=1e-13)
    ours = jk.get_jk(dm, direct_scf_tol=1e-13)
    assert max(abs(a - b).max() for a, b in zip(ours, theirs(mol, dm))) < TOLERANCE


def test_nothing_to_build(backend):
    mol = molecule(WATER, "6-31g")
    dm = random_densities(mol, 2)
    for tolerance in (0, 1e-13):
        vj, none = md4.get_jk(mol, dm, 2, with_k=False, backend=backend, direct_scf_tol=tolerance)
        assert none is None
        assert not vj.any()
        assert md4.get_jk(mol, dm, 2, False, False, backend=backend, direct_scf_tol=tolerance) == (None, None)


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True)])
def test_tolerance_beyond_all_quartets(backend, flags):
    """Then there is no pair list at all."""
    mol = molecule(WATER, "6-31g")
    jk = md4.JK(mol, backend=backend, direct_scf_tol=1e12)
    results = jk.get_jk(random_densities(mol), 1, *flags)
    assert jk.lists == []
    assert jk.stats.computed == 0
    assert tuple(v is not None for v in results) == flags
    assert not any(v.any() for v in results if v is not None)


@pytest.mark.parametrize("distance", [3, 40])
def test_no_tolerance_skips_nothing(backend, distance):
    """But products of functions far apart, which are zero in double precision."""
    mol = molecule(f"He 0 0 0; He 0 0 {distance}", "6-31g")
    jk, dm = md4.JK(mol, backend=backend, direct_scf_tol=0), random_densities(mol)
    dm[..., 0] = dm[..., 0, :] = 0.0
    ours = jk.get_jk(dm)
    assert (jk.stats.skipped == 0) == (distance == 3)
    assert max(abs(a - b).max() for a, b in zip(ours, theirs(mol, dm))) < TOLERANCE


# memory ---------------------------------------------------------------------------------------------------------------


def test_max_memory_is_enough_for_little(backend):
    """H matrices that do not fit are made anew; the result is the same."""
    mol = molecule(WATER, "cc-pvtz")
    dm = random_densities(mol)
    jk = md4.JK(mol, backend=backend, max_memory=20)
    expected = theirs(mol, dm)
    for _ in range(3):  # J alone keeps other forms of H; what a build leaves must not starve the next one
        ours = jk.get_jk(dm)
        assert max(abs(a - b).max() for a, b in zip(ours, expected)) < TOLERANCE
        assert abs(jk.get_jk(dm, with_k=False)[0] - expected[0]).max() < TOLERANCE
    if backend == "cuda":
        assert jk.engine.backend.context.pool.peak <= 20e6


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True)])
def test_results_do_not_count_against_the_cap(flags):
    """They belong to the caller, who may keep those of many builds."""
    mol = molecule(WATER, "6-31g")
    jk, dm, kept = md4.JK(mol, backend="cpu", max_memory=20), random_densities(mol), []
    for _ in range(3):
        kept.append(jk.get_jk(dm, 1, *flags))
        kept.append(jk.engine.backend.memory_left())
    assert kept[1] == kept[3] == kept[5]


@pytest.mark.gpu
def test_h_makes_room_for_more_densities():
    """H matrices kept from a build with one density matrix give way where many need their memory."""
    mol, cap = molecule(WATER, "cc-pvqz"), 60
    jk = md4.JK(mol, backend="cuda", max_memory=cap)
    jk.get_jk(random_densities(mol))
    gc.collect()  # a kernel that was compiled here leaves cycles, which refer to the frames of its callers
    dm = random_densities(mol, count=int(0.6e6 * cap / (4 * 8 * mol.nao**2)))  # D of J and of K, J and K
    expected = theirs(mol, dm)
    assert max(abs(a - b).max() for a, b in zip(jk.get_jk(dm), expected)) < TOLERANCE
    assert jk.engine.backend.context.pool.peak <= cap * 1e6


def test_what_a_build_keeps_counts(backend):
    """D + D^T, whose memory serves the next build."""
    mol = molecule(WATER, "6-31g")
    jk, dm = md4.JK(mol, backend=backend, max_memory=20), random_densities(mol, count=3)
    jk.get_jk(dm)
    gc.collect()  # a kernel that was compiled here leaves cycles, which refer to the frames of its callers
    left, jk._kept = jk.engine.backend.memory_left(), None
    assert jk.engine.backend.memory_left() - left == dm.nbytes


def test_what_a_build_keeps_gives_way():
    """All of a build that is refused, and what neither K alone nor a gradient needs."""
    mol = molecule(WATER, "6-31g")
    jk, dm = md4.JK(mol, backend="cpu", max_memory=2), random_densities(mol)[0]
    with pytest.raises(MemoryLimitError):
        jk.get_jk(random_densities(mol, count=2000))
    for work in (jk.gradient, lambda dm: jk.get_jk(dm, with_j=False)):
        work(dm)
        assert jk._kept.size == 0
        jk.get_jk(dm)
        assert jk._kept.size > 0


# Four contracted functions in each shell, so that there are more products than Hermite functions.
CONTRACTED = {"He": [[1, *([exponent, 1.0, 0.5, 0.2, -0.3] for exponent in (0.2, 1.0, 5.0, 20.0))]]}


@pytest.mark.parametrize("name, hermi, matrices, options", [
    ("get_jk", 1, 1, {"with_k": False}), ("get_jk", 0, 2, {}), ("derivative_jk", 0, 6, {}),
])  # fmt: skip
def test_copies_of_many_densities_count(name, hermi, matrices, options):
    """And copies of J and K, but for those that are returned."""
    mol = molecule("; ".join(f"He 0 0 {n}" for n in range(4)), CONTRACTED)
    dm = random_densities(mol, hermi, 40)

    def work(cap):
        return getattr(md4.JK(mol, backend="cpu", max_memory=cap), name)(dm, hermi, **options)

    until_enough(work, 3.0, matrices * dm.nbytes * 1e-6)


@pytest.mark.parametrize("basis, count, max_memory", [("cc-pvtz", 8, 1.0), ("6-31g", 1, 0.01)])
def test_too_little_memory_is_refused(backend, basis, count, max_memory):
    """Of matrices, and of the least workspace."""
    mol = molecule(WATER, basis)
    with pytest.raises(MemoryLimitError, match="raise max_memory"):
        md4.get_jk(mol, random_densities(mol, count=count), backend=backend, max_memory=max_memory)


# bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dm": np.zeros((3, 3))}, "must have shape"),
        ({"dm": np.zeros((0, 7, 7))}, "must have shape"),
        ({"dm": np.full((7, 7), np.nan)}, "not finite"),
        ({"dm": np.full((7, 7), "a")}, "numbers"),
        ({"hermi": 3}, "hermi must be"),
        ({"direct_scf_tol": -1e-9}, "not negative"),
        ({"direct_scf_tol": np.nan}, "finite"),
        ({"backend": "abacus"}, "unknown"),
    ],
)
def test_bad_input(change, message):
    mol = molecule(WATER, "sto-3g")
    with pytest.raises(ArgumentError, match=message):
        md4.get_jk(**{"mol": mol, "dm": np.eye(7), "backend": "cpu", **change})


@pytest.mark.parametrize("tolerance", [-1e-9, np.nan, np.inf])
def test_bad_tolerance_of_a_build(tolerance):
    mol = molecule(WATER, "sto-3g")
    with pytest.raises(ArgumentError, match="direct_scf_tol"):
        md4.JK(mol, backend="cpu").get_jk(np.eye(7), direct_scf_tol=tolerance)


@pytest.mark.parametrize("method", ["get_jk", "update"])
def test_device_array_without_gpu(method):
    class DeviceArray:
        __cuda_array_interface__ = None

    with pytest.raises(ArgumentError, match="device array"):
        getattr(md4.JK(molecule(WATER, "sto-3g"), backend="cpu"), method)(DeviceArray())


# GPU ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_k", [False, True])
def test_times_of_a_build(backend, with_k):
    mol = molecule(WATER, "sto-3g")
    jk = md4.JK(mol, backend=backend)
    jk.get_jk(random_densities(mol)[0], with_k=with_k)
    (busy,) = jk.stats.busy
    assert 0 < busy < busy + jk.stats.sums < jk.stats.seconds


@pytest.mark.gpu
@pytest.mark.parametrize("basis", ["cc-pvqz", "cc-pv5z"])
@pytest.mark.parametrize("hermi", [0, 1])
def test_large_bases(gpu, basis, hermi):
    """Against the CPU backend: libcint's own errors reach 1e-9 with h functions."""
    mol = molecule(WATER, basis, cart=basis == "cc-pvqz")
    dm = random_densities(mol, hermi)
    ours, reference = (md4.get_jk(mol, dm, hermi, backend=b) for b in ("cuda", "cpu"))
    assert max(abs(a - b).max() for a, b in zip(ours, reference)) < TOLERANCE


@pytest.mark.gpu
def test_benzene(gpu):
    check(molecule(BENZENE, "cc-pvtz"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["get_jk", "update"])
@pytest.mark.parametrize("phase", [1.0, 1j], ids=["real", "complex"])
def test_device_arrays(gpu, method, phase):
    from numba import cuda

    mol = molecule(WATER, "cc-pvdz")
    dm = random_densities(mol)[0]
    build = getattr(md4.JK(mol, backend="cuda"), method)
    for factor in (1.0, 0.9):
        ours = build(cuda.to_device(phase * factor * dm), hermi=0)
        assert all(hasattr(v, "__cuda_array_interface__") for v in ours)
        for mine, reference in zip(ours, theirs(mol, dm)):
            assert abs(host(mine) - phase * factor * reference).max() < TOLERANCE
