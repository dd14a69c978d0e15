"""Metrics of auxiliary functions that coincide, or nearly do: J and K hardly change, and the user is told."""

import numpy as np
import pytest
from densities import random_densities
from molecules import WATER, molecule
from pyscf import df, gto
from traced_memory import traced

import md4
from md4.contract.metric import MARGIN, Metric, metric_bytes
from md4.contract.metric_rows import inverse
from md4.contract.three_centre import ThreeCentre
from md4.cpu.algebra import HostAlgebra
from md4.engine import make_backend
from md4.method.operators import as_operator

JKFIT = {symbol: gto.basis.load("cc-pvdz-jkfit", symbol) for symbol in "OH"}
MESSAGE = "the auxiliary functions are linearly dependent within rounding, or nearly so"


def doubled(change):
    """The auxiliary basis, and its uncontracted shells once more with exponents that are larger by a factor."""
    again = {
        symbol: [[l, *[[a * (1 + change), c] for a, c in more]] for l, *more in shells if len(more) == 1]
        for symbol, shells in JKFIT.items()
    }
    return {symbol: JKFIT[symbol] + again[symbol] for symbol in JKFIT}


def with_ghost(distance):
    """Water, and a centre so many Angstrom from the oxygen atom that has the same auxiliary functions."""
    first, *others = WATER.split(";")
    _, x, y, z = first.split()
    ghost = f"ghost-O {x} {y} {float(z) + distance:.16f}"
    basis = {"O": "6-31g", "H": "6-31g", "ghost-O": [[0, [0.5, 1.0]]]}
    mol = gto.M(atom=";".join([first, *others, ghost]), basis=basis, verbose=0)
    return mol, JKFIT | {"ghost-O": JKFIT["O"]}


def case(kind, amount):
    return with_ghost(amount) if kind == "centre" else (molecule(WATER, "6-31g"), doubled(amount))


@pytest.mark.parametrize("kind, amount", [
    ("exponents", 0.0), ("exponents", 1e-14), ("exponents", 1e-10), ("exponents", 1e-6), ("exponents", 0.1),
    ("centre", 0.0), ("centre", 1e-13), ("centre", 1e-9), ("centre", 1e-6), ("centre", 0.1), ("centre", 1.0),
])  # fmt: skip
def test_functions_that_coincide(kind, amount):
    """By eigenvectors, as PySCF, or by Cholesky where they are far enough from each other."""
    mol, auxbasis = case(kind, amount)
    ours, theirs = md4.DF(mol, auxbasis, backend="cpu"), df.DF(mol, auxbasis).build()
    metric = ours.build()._md4_fitting().metric
    assert metric.how == ("eigenvectors" if amount < 1e-5 else "Cholesky")
    dm = random_densities(mol)[0]
    if ours.get_naoaux() == theirs.get_naoaux():
        for mine, other in zip(ours.get_jk(dm), theirs.get_jk(dm), strict=True):
            assert abs(mine - other).max() < 1e-10 * abs(other).max()


@pytest.mark.parametrize("kind, amount, labels", [
    ("exponents", 3e-3, ("0 O",)), ("centre", 1e-3, ("0 O", "3 GHOST-O")),
])  # fmt: skip
def test_functions_that_nearly_coincide(kind, amount, labels, capsys, caplog):
    """Rounding would decide what they add, so they are left out: PySCF's log and Python's say so, and name some."""
    mol, auxbasis = case(kind, amount)
    mol.verbose = 3
    fit = md4.DF(mol, auxbasis, backend="cpu").build()
    metric = fit._md4_fitting().metric
    assert metric.how == "eigenvectors"
    assert metric.doubt.smallest < MARGIN * metric.doubt.rounding
    told = "".join(capsys.readouterr())
    assert told.count(MESSAGE) == 1
    assert all(f"'{label} " in told for label in labels)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [metric.doubt.text()]
    assert len(set(metric.doubt.functions)) == 4


@pytest.mark.parametrize("auxbasis", ["cc-pvdz-jkfit", "cc-pvtz-jkfit", "aug-cc-pvtz-jkfit", "aug-cc-pvtz-ri"])
def test_usual_sets(auxbasis):
    assert md4.DF(molecule(WATER, "6-31g"), auxbasis, backend="cpu").build()._md4_fitting().metric.doubt is None


@pytest.mark.parametrize("smallest, doubtful", [(1e-3, False), (1e-11, False), (1e-13, True), (5e-15, True)])
def test_the_smallest_eigenvalue(smallest, doubtful):
    """To a factor of a few."""
    n, rng = 60, np.random.default_rng(1)
    q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    matrix = (q * np.geomspace(smallest, 10, n)) @ q.T
    metric = Metric((matrix + matrix.T) / 2, HostAlgebra(make_backend("cpu", as_operator("coulomb"))))
    assert (metric.doubt is not None) == doubtful
    assert metric.how == ("eigenvectors" if doubtful else "Cholesky")
    if doubtful:
        assert smallest / 5 < metric.doubt.smallest < 5 * smallest
        assert metric.doubt.functions[0] in np.argsort(-abs(q[:, 0]))[:3]


@pytest.mark.parametrize("n", [20, 60, 300])
def test_memory_of_eigenvectors(n):
    """That of the matrix, of LAPACK and of W is what is checked beforehand."""
    matrix = np.ones((n, n)) + np.diag(np.arange(n) > 0)  # singular
    matrix[0] = matrix[:, 0] = 0.0

    def work():
        return Metric(matrix.copy(), HostAlgebra(make_backend("cpu", as_operator("coulomb"))))

    assert work().size == n - 1
    _, peak = traced(work)
    assert 0.9 * metric_bytes(n) < 1e6 * peak < metric_bytes(n) + 20_000


def test_long_range():
    """Its metrics are nearly singular with nearly all sets, so nobody is told; of the short range somebody is."""
    fit = md4.DF(molecule(WATER, "def2-svp"), "def2-universal-jkfit", backend="cpu")
    metric = fit._md4_fitting(1.0).metric
    assert (metric.how, metric.doubt) == ("Cholesky", None)
    smallest = np.linalg.eigvalsh(metric.lower @ metric.lower.T)[0]
    assert smallest < 1e-11
    algebra, matrix = HostAlgebra(make_backend("cpu", as_operator("coulomb"))), metric.lower @ metric.lower.T
    for kind, doubtful in (("coulomb", True), ("erfc", True), ("erf", False), ("gaussian", False)):
        assert (inverse(matrix.copy(), algebra, kind).doubt is not None) == doubtful


def test_one_function():
    metric = Metric(np.full((1, 1), 2.0), HostAlgebra(make_backend("cpu", as_operator("coulomb"))))
    assert metric.doubt is None


@pytest.mark.parametrize("kind, amount", [("exponents", 3e-3), ("centre", 1e-3), ("centre", 1e-4)])
def test_rounding_decides_nothing(kind, amount, monkeypatch):
    """J and K stay the same if the last bits of the metric change, whether it has an L or not."""
    mol, auxbasis = case(kind, amount)
    dm, found, rng = random_densities(mol)[0], [], np.random.default_rng(0)
    cholesky = HostAlgebra.cholesky
    for factor in (cholesky, lambda *_: None, cholesky):
        monkeypatch.setattr(HostAlgebra, "cholesky", factor)
        found.append(md4.DF(mol, auxbasis, backend="cpu").get_jk(dm))
        real = ThreeCentre.metric

        def changed(three, real=real):
            metric = real(three)
            return metric * (1 + 1e-16 * rng.integers(-2, 3, metric.shape))

        monkeypatch.setattr(ThreeCentre, "metric", changed)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert abs(mine - theirs).max() < 1e-9 * abs(mine).max()
