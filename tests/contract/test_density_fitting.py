"""J and K by density fitting against PySCF's: densities of any symmetry, each store, little memory."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from densities import random_densities
from molecules import WATER, molecule
from pyscf import df, lib, scf
from traced_memory import OBJECTS_MB, traced, until_enough

import md4
from md4.contract.density_fitting import DensityFitting
from md4.contract.exchange_factors import Factors, factors, panels
from md4.contract.fitting_stores import Columns, chosen_store
from md4.cpu.algebra import HostAlgebra

AUXILIARY = "cc-pvdz-jkfit"


def fitting(mol, auxbasis=AUXILIARY, **options):
    bases = (md4.Basis.from_mol(m) for m in (mol, df.make_auxmol(mol, auxbasis)))
    return DensityFitting(*bases, **{"backend": "cpu", **options})


@pytest.fixture(scope="module")
def water():
    """With general contractions, which md4 splits."""
    return molecule(WATER, "cc-pvdz")


@pytest.fixture(scope="module")
def theirs(water):
    # in memory, however much the process has taken
    return df.DF(water, AUXILIARY).set(max_memory=1e6).build()


@pytest.fixture(scope="module", params=["device", "host", "direct"])
def ours(request, water):
    return fitting(water, store=request.param)


def assert_same(found, wanted, tolerance=1e-10):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert abs(a - b).max() < tolerance


# results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hermi", [0, 1, 2])
def test_jk(ours, theirs, water, hermi):
    dm = random_densities(water, hermi, 2)
    assert_same(ours.get_jk(dm, hermi), theirs.get_jk(dm, hermi))
    assert_same(ours.get_jk(dm[0], hermi), theirs.get_jk(dm[0], hermi))


def test_jk_complex(ours, theirs, water):
    dm = random_densities(water, 1) + 1j * random_densities(water, 2, seed=1)
    assert_same(ours.get_jk(dm), theirs.get_jk(dm))


def test_j_and_k_alone(ours, water):
    dm = random_densities(water, 0)
    vj, vk = ours.get_jk(dm, 0)
    j, nothing = ours.get_jk(dm, 0, with_k=False)
    assert nothing is None
    nothing, k = ours.get_jk(dm, 0, with_j=False)
    assert nothing is None
    assert_same((j, k), (vj, vk), 1e-12)


def test_symmetry_is_seen(ours, water):
    """Whatever the caller says of it; a wrong hermi must not give a wrong K."""
    dm = random_densities(water, 0)
    assert_same(ours.get_jk(dm, 1), ours.get_jk(dm, 0), 1e-14)


def test_a_small_antisymmetric_part(ours, water):
    """That of K is there as well, unless it is a rounding error."""
    dm, odd = (random_densities(water, hermi, 2)[0] for hermi in (1, 2))
    k = ours.get_jk(dm + 1e-8 * odd, 0)[1]
    assert abs((k - k.T) / 2 - 1e-8 * ours.get_jk(odd, 2)[1]).max() < 1e-12


def test_orbitals(ours, theirs, water):
    """Occupied orbitals, with any occupations, are used where they make up the density, and only there."""
    rng = np.random.default_rng(0)
    c, n = rng.normal(size=(water.nao, 5)), np.array([2, 1.3, 0, 0.5, 1])
    dm = (c * n) @ c.T
    wanted = theirs.get_jk(dm)
    assert_same(ours.get_jk(dm, orbitals=[(c, n)]), wanted)
    assert_same(ours.get_jk(dm, orbitals=[(c, 2 * n)]), wanted)


def test_a_small_change_of_a_density_with_orbitals(ours, water):
    """The orbitals are not taken in its place, however small the change is beside the largest element."""
    rng = np.random.default_rng(0)
    c, n = rng.normal(size=(water.nao, 5)), np.array([2, 1.3, 0, 0.5, 1])
    dm, unit = (c * n) @ c.T, np.zeros((water.nao, water.nao))
    unit[3, 2] = unit[2, 3] = abs(dm).max()
    assert factors(dm, ours.algebra, (c, n), abs(dm).max()).rank == 4
    assert factors(dm + 1e-13 * unit, ours.algebra, (c, n), abs(dm).max()).rank > 4
    before, after = (ours.get_jk(some, orbitals=[(c, n)])[1] for some in (dm, dm + 1e-11 * unit))
    wanted = ours.get_jk(unit)[1]
    assert abs((after - before) / 1e-11 - wanted).max() < 0.01 * abs(wanted).max()


@pytest.mark.parametrize("negative", [0, 2, 5])
def test_factors_in_part(negative):
    """Which of them have a negative sign."""
    f = Factors(*[np.arange(10.0).reshape(2, 5)] * 2, negative)
    parts = [f[first : first + 2] for first in range(0, 5, 2)]
    assert [part.rank for part in parts] == [2, 2, 1]
    assert [part.negative for part in parts] == {0: [0, 0, 0], 2: [2, 0, 0], 5: [2, 2, 1]}[negative]
    assert f[1:4].negative == {0: 0, 2: 1, 5: 3}[negative]
    assert all(part.symmetric for part in parts)
    assert not Factors(f.left, f.left + 1, negative)[1:].symmetric


@pytest.mark.parametrize("nao", [1, 150, 500, 999, 1566])
def test_panels(nao):
    """They are the rows of K, of whole tiles, three to five each where there are so many."""
    found = panels(nao)
    assert [n for first, last in found for n in range(first, last)] == list(range(nao))
    assert all(first % 128 == 0 for first, _ in found)
    assert all(256 < last - first <= 640 for first, last in found) or len(found) == 1
    assert len(found) == {1: 1, 150: 1, 500: 1, 999: 2, 1566: 4}[nao]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1j * np.nan])
@pytest.mark.parametrize("what", [{"with_k": False}, {"with_j": False}, {}], ids=["J", "K", "J and K"])
def test_numbers_that_are_not_finite(ours, water, bad, what):
    """Also in a density whose orbitals are."""
    dm = np.zeros((2, water.nao, water.nao), dtype=type(bad))
    dm[1, 3, 2] = bad
    with pytest.raises(md4.ArgumentError, match="elements that are not finite"):
        ours.get_jk(dm, orbitals=[(np.eye(water.nao), np.zeros(water.nao))] * 2, **what)


def test_zero_density(ours, water):
    assert all(not v.any() for v in ours.get_jk(np.zeros((water.nao, water.nao))))


def test_rows(ours, theirs):
    """Those of PySCF, in its order."""
    assert ours.size == len(theirs._cderi)
    found = np.concatenate([ours.rows(0, 50), ours.rows(50, ours.size)])
    assert abs(found - theirs._cderi).max() < 1e-11


def test_operator(water):
    """Of long and of short range."""
    dm, reference = random_densities(water), df.DF(water, AUXILIARY)
    for kind, omega in (("erf", 0.4), ("erfc", -0.4)):
        made = fitting(water, operator=(kind, 0.4))
        assert_same(made.get_jk(dm), reference.get_jk(dm, omega=omega))


def test_cutoff(theirs):
    """Pairs of shells that are far from each other are left out."""
    mol = molecule("He 0 0 0; He 0 0 3; He 0 0 9; He 0 0 14", "6-31g**")
    reference, dm = df.DF(mol, "cc-pvdz-ri").build(), random_densities(mol)
    for store in ("device", "direct"):
        made = fitting(mol, "cc-pvdz-ri", store=store, cutoff=1e-12)
        assert made.three.ncol < fitting(mol, "cc-pvdz-ri", cutoff=0).three.ncol
        assert_same(made.get_jk(dm), reference.get_jk(dm))
        assert abs(made.rows(0, made.size) - reference._cderi).max() < 1e-10


@pytest.mark.parametrize("store", ["device", "host", "direct"])
def test_memory_that_nobody_has_written(store, monkeypatch):
    """Pairs of distant shells are left out: there are zeros, whatever was in the memory before."""
    mol, empty = molecule("H 0 0 0; F 0 0 0.9; H 0 0 40", "6-31g"), HostAlgebra.empty

    def poisoned(algebra, shape):
        array = empty(algebra, shape)
        array[...] = np.nan
        return array

    for name in ("empty", "host_table"):
        monkeypatch.setattr(HostAlgebra, name, poisoned)
    fit, fitted = fitting(mol, store=store), df.DF(mol, AUXILIARY)
    assert fit.three.ncol < mol.nao * (mol.nao + 1) // 2
    for hermi in (0, 1):
        dm = random_densities(mol, hermi, 2)
        assert_same(fit.get_jk(dm, hermi), fitted.get_jk(dm, hermi))
    assert_same([fit.rows(0, fit.size)], [fitted.build()._cderi])
    left, right = (np.random.default_rng(0).normal(size=(mol.nao, n)) for n in (2, 3))
    made, whole = fit.mo_rows(left, right), lib.unpack_tril(fitted._cderi)
    assert_same([made], [np.einsum("qij,ia,jb->qab", whole, left, right)])


def test_auxiliary_functions_elsewhere(water):
    """Auxiliary functions of another geometry, such as bond functions, are as good as others."""
    centres = molecule("He 0 0.4 -0.2; He 0 -0.4 -0.2; Ne 0 0 0.1", "cc-pvdz")
    made = DensityFitting(*(md4.Basis.from_mol(m) for m in (water, centres)), backend="cpu")
    cderi = df.incore.cholesky_eri(water, auxmol=centres)
    assert abs(made.rows(0, made.size) - cderi).max() < 1e-10


# the metric -----------------------------------------------------------------------------------------------------------


def dependent(mol):
    """An even-tempered auxiliary basis so narrow that its functions are linearly dependent in double precision."""
    return df.aug_etb(mol, beta=1.2)


@pytest.mark.parametrize("store", ["device", "host", "direct"])
def test_dependent_functions(water, store):
    """By eigenvectors, as PySCF; there are fewer rows then."""
    made, reference = fitting(water, dependent(water), store=store), df.DF(water, dependent(water)).build()
    assert made.metric.how == "eigenvectors"
    assert made.size == reference.get_naoaux() < made.three.naux
    dm = random_densities(water, 0)
    assert_same(made.get_jk(dm, 0), reference.get_jk(dm, 0))
    rows = made.rows(0, made.size)
    assert abs(rows.T @ rows - reference._cderi.T @ reference._cderi).max() < 1e-10


def test_no_auxiliary_function_left(water):
    with pytest.raises(md4.BasisError, match="no eigenvalue above"):
        fitting(water, {"H": [[0, [1e18, 1], [2e18, -1]]] * 2, "O": [[0, [1e18, 1], [2e18, -1]]] * 2})


# memory ---------------------------------------------------------------------------------------------------------------


def test_small_blocks(water, theirs, monkeypatch):
    """Many chunks of columns, blocks of rows, panels of K, and passes through the integrals."""
    monkeypatch.setattr("md4.contract.exchange_factors.TILE", 3)
    monkeypatch.setattr(HostAlgebra, "chunk_bytes", 1 << 15)
    monkeypatch.setattr(HostAlgebra, "block_bytes", 1 << 15)
    dm = random_densities(water, 0, 2)
    dm[1] += dm[1].T
    wanted = theirs.get_jk(dm, 0)
    for store in ("device", "host", "direct"):
        made = fitting(water, store=store)
        assert len(made.columns.cuts()) > 5
        assert_same(made.get_jk(dm, 0), wanted)


def test_several_passes(water, theirs, monkeypatch):
    """Orbitals in groups, where not all half-transformed integrals fit into memory."""
    made, passes = fitting(water, store="direct"), []
    chunks = Columns.chunks
    monkeypatch.setattr(Columns, "chunks", lambda self, *ranges: passes.append(1) or chunks(self, *ranges))
    column = 8 * made.three.naux * water.nao
    monkeypatch.setattr(HostAlgebra, "memory_left", lambda self: self.columns_bytes + 20 * column)
    monkeypatch.setattr(HostAlgebra, "columns_bytes", made.columns.least_bytes, raising=False)
    dm = random_densities(water, 0, 2)
    dm[1] += dm[1].T
    assert_same(made.get_jk(dm, 0), theirs.get_jk(dm, 0))
    assert len(passes) > 5


def test_k_of_zero_densities_needs_no_integrals(water, monkeypatch):
    made = fitting(water, store="direct")
    monkeypatch.setattr(Columns, "chunks", None)
    _, vk = made.get_jk(np.zeros((2, water.nao, water.nao)), with_j=False)
    assert not vk.any()


def test_store_follows_memory(water):
    """A tensor that does not fit under the cap is not kept; one that is asked for is refused with its size."""
    assert fitting(water).store == "device"
    assert fitting(water, max_memory=2).store == "device"
    assert fitting(water, max_memory=0.45).store == "direct"
    for store in ("device", "host"):
        with pytest.raises(md4.MemoryLimitError, match=r"tensor of 116 .* 323 pairs .* 312 kB .* use store=.dire"):
            fitting(water, store=store, max_memory=0.45)
    with pytest.raises(md4.MemoryLimitError, match="the metric of 116 auxiliary functions"):
        fitting(water, max_memory=0.35)


@pytest.mark.parametrize("store, device, host, chosen", [
    ("auto", 900, 0, "device"), ("auto", 800, 2000, "host"), ("auto", 800, 800, "direct"), ("auto", 50, 2000, "direct"),
    ("host", 800, 2000, "host"), ("direct", 9000, 9000, "direct"), ("device", 800, 2000, "store='host' or 'direct'"),
    ("host", 2000, 800, "store='device' or 'direct'"), ("device", 800, 0, "store='direct'"),
])  # fmt: skip
def test_chosen_store(store, device, host, chosen):
    """A table of 6 rows with 15 columns and one of zeros takes 768 bytes, the builds 100 beside it."""
    algebra = SimpleNamespace(
        memory_left=lambda: device, host_left=lambda: host, has_host_memory=True, held_bytes=lambda n: n,
        check_fits=lambda *_: None,
    )  # fmt: skip
    if not chosen.startswith("store="):
        assert chosen_store(store, algebra, (6, 15), 100) == chosen
        return
    with pytest.raises(md4.MemoryLimitError, match=f"768 B and its builds 100 B.* or use {chosen}"):
        chosen_store(store, algebra, (6, 15), 100)


@pytest.mark.parametrize("store", ["device", "host"])
def test_what_a_refusal_of_a_store_names_is_enough(water, store):
    """With what is held, and what builds need beside the tensor."""
    *_, refusals = until_enough(lambda cap: fitting(water, store=store, max_memory=cap).size, 0.37)
    assert "and its builds" in refusals[-1]


def test_too_many_densities(water):
    made = fitting(water, max_memory=5)
    with pytest.raises(md4.MemoryLimitError, match="give fewer at once"):
        made.get_jk(np.zeros((400, water.nao, water.nao)))


def test_peak_stays_below_the_cap(water):
    """What is counted: tables, chunks, blocks and products."""
    for store, cap in (("device", 0.75), ("direct", 0.55)):
        made, most = fitting(water, store=store, max_memory=cap), 0
        memory = made.engine.backend.memory
        watch = memory.watch

        def watched(*args, watch=watch, memory=memory):
            nonlocal most
            made = watch(*args)
            most = max(most, memory.held)
            return made

        memory.watch = watched
        made.get_jk(random_densities(water, 0, 2), 0)
        assert 0 < most <= memory.cap


def test_screening_stays_below_the_cap():
    """The bound of one pair of contracted f shells needs more than all that follows."""
    shells = [[3, *([exponent, 1.0, 0.5] for exponent in (0.3, 1.0, 3.0))]]
    mol = molecule("He 0 0 0", {"He": shells})
    with pytest.raises(md4.MemoryLimitError, match=r"Schwarz bound of one pair of shells .* 1 MB may be used"):
        fitting(mol, {"He": [[0, [1.0, 1.0]]]}, max_memory=1)
    with pytest.raises(md4.MemoryLimitError, match="the Schwarz bound of one pair of shells"):
        fitting(molecule("He 0 0 0", "sto-3g"), {"He": [[10, *shells[0][1:]]]}, max_memory=0.2)


@pytest.mark.parametrize("with_k", [False, True])
def test_slices_of_lists_stay_below_the_cap(with_k):
    """Of contracted f shells a chunk of columns is so short that its H matrices fit, too."""
    shells = {"He": [[3, *([exponent, 1.0] for exponent in (0.2, 2.0, 20.0))]]}
    mol = molecule("; ".join(f"He 0 0 {n}" for n in range(6)), shells)
    dm, whole = random_densities(mol)[0], fitting(mol, shells)
    want = whole.get_jk(dm, 0, with_k=with_k)

    def work(cap):
        return fitting(mol, shells, store="direct", max_memory=cap).get_jk(dm, 0, with_k=with_k)

    _, least, _ = until_enough(work, 2.0)
    for cap in (least, 4.0, 8.0):
        found, peak = traced(lambda: work(cap))  # noqa: B023 called at once
        assert_same(found[: 1 + with_k], want[: 1 + with_k])
        assert peak < cap + OBJECTS_MB


@pytest.mark.parametrize("store", ["device", "host", "direct"])
def test_operators_share_the_cap(water, store):
    """Tensors of several operators, and their workspaces, take together what one cap allows."""
    cap = {"device": 2.0, "host": 2.0, "direct": 1.2}[store]
    made, dm = fitting(water, store=store, max_memory=cap), random_densities(water, 0, 2)
    others = {omega: made.with_operator(md4.Operator.from_omega(omega)) for omega in (0.3, -0.3)}
    memory = made.engine.backend.memory
    for omega, other in others.items():
        assert other.store == store
        assert other.engine.backend.memory is memory
        wanted = fitting(water, operator=md4.Operator.from_omega(omega), store=store)
        assert_same(other.get_jk(dm, 0), wanted.get_jk(dm, 0))
    assert_same(made.get_jk(dm, 0), fitting(water).get_jk(dm, 0))  # it is as before
    assert memory.held < memory.cap
    with pytest.raises(md4.MemoryLimitError, match="max_memory"):
        others |= {omega: made.with_operator(md4.Operator.erf(omega)) for omega in range(1, 40)}


# what else ------------------------------------------------------------------------------------------------------------


def test_the_log_tells_the_store(water, caplog):
    with caplog.at_level(logging.DEBUG, logger="md4"):
        fitting(water, store="direct")
    assert "116 auxiliary functions, 323 columns for 24 AOs, metric by Cholesky" in caplog.text
    assert "made in each build" in caplog.text


@pytest.mark.parametrize("options, match", [
    ({"store": "disk"}, "store 'disk' is unknown"),
    ({"cutoff": -1}, "cutoff must be"),
    ({"backend": "gpu"}, "backend 'gpu'"),
    ({"operator": ("yukawa", 0.4)}, "a cutoff needs one of the operators coulomb, erf, erfc, not yukawa"),
])  # fmt: skip
def test_bad_options(water, options, match):
    with pytest.raises(md4.ArgumentError, match=match):
        fitting(water, **options)


def test_bad_densities(ours, water):
    with pytest.raises(md4.ArgumentError, match="shape"):
        ours.get_jk(np.zeros((2, 2)))
    with pytest.raises(md4.ArgumentError, match="hermi"):
        ours.get_jk(np.eye(water.nao), 3)


def test_energy_functional(water, ours):
    """One number by another way: the Coulomb energy of a density from rows of the tensor."""
    dm = scf.RHF(water).get_init_guess()
    rows = ours.rows(0, ours.size)
    i, j = np.tril_indices(water.nao)
    rho = rows @ ((dm + dm.T)[i, j] * np.where(i == j, 0.5, 1))
    assert abs(rho @ rho - np.vdot(dm, ours.get_jk(dm)[0])) < 1e-10
