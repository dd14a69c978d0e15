"""Three- and two-centre integrals against libcint: classes, samples, faults, and the part of the report."""

import numpy as np
import pytest
from molecules import HYDROGEN_FLUORIDE, molecule
from pages import Page

from md4.engine import Engine
from md4.errors import ArgumentError, UnsupportedError
from md4.validation import identities as checks
from md4.validation import report
from md4.validation.fitting import fitting_basis, fitting_classes, validate_fitting
from md4.validation.libcint import Libcint, class_label, format_table, samples
from md4.validation.page import page
from md4.validation.report import make_report, settled_fitting

df = pytest.importorskip("pyscf.df")
pytest.importorskip("mpmath")

TOLERANCES = 1e-12, 1e-10


@pytest.fixture(scope="module")
def hf():
    return molecule(HYDROGEN_FLUORIDE, "6-31g")


@pytest.fixture(scope="module")
def auxmol(hf):
    """s to f functions."""
    return df.make_auxmol(hf, "cc-pvdz-jkfit")


def every_l(cart, lmax=6):
    """Two molecules: a segmented shell of each l on one atom, and one with two functions on the other."""
    few = [[l, [0.9 + 0.1 * l, 1.0], [3.1, 0.4]] for l in range(lmax + 1)]
    more = [[l, [0.7 + 0.1 * l, 1.0, 0.3], [2.3, 0.4, -0.8]] for l in range(lmax + 1)]
    atom = "H 0.1 0.2 -0.1; F 0 0.3 0.9"
    return (molecule(atom, basis, cart=cart) for basis in ({"H": few, "F": more}, {"H": more, "F": few}))


@pytest.mark.parametrize("omega", [None, 0.3, -0.3])
@pytest.mark.parametrize("cart", [False, True])
def test_cpu_agrees_with_libcint(cart, omega):
    """libcint's own erfc is good to 1e-10 only, so that the oracle decides."""
    mol, auxmol = every_l(cart, 2)
    records, _ = settled_fitting(mol, auxmol, "cpu", *TOLERANCES, omega, max_quartets_per_class=4)
    assert len(records) == 18 + 6
    assert all(record.passed for record in records), "\n" + format_table(records)


@pytest.mark.slow
@pytest.mark.parametrize("cart", [False, True])
def test_all_classes_to_i(backend, cart):
    """Every (ab|c) and (a|b) up to (ii|i) and (i|i); where libcint is off, the oracle decides."""
    records, rulings = settled_fitting(*every_l(cart), backend, *TOLERANCES, None)
    assert len(records) == 28 * 7 + 28
    print(format_table(records, "blocks"))
    print(f"{len(rulings)} blocks to the oracle")
    assert all(record.passed for record in records), "\n" + format_table(records)


@pytest.mark.parametrize("fault", [1e-6, np.nan])
def test_a_fault_is_found(hf, auxmol, monkeypatch, fault):
    compute = Engine.compute

    def faulty(self, bra, ket, out=None):
        result = compute(self, bra, ket, out)
        result[..., 0] += fault
        return result

    monkeypatch.setattr(Engine, "compute", faulty)
    records, rulings = settled_fitting(hf, auxmol, "cpu", *TOLERANCES, None, max_quartets_per_class=2)
    assert not any(record.passed for record in records)
    assert {ruling.who for ruling in rulings} == {"libcint"}
    assert "22 beyond tolerance" in format_table(records)


def test_where_libcint_is_off_md4_passes(hf, auxmol, monkeypatch):
    blocks = Libcint.blocks

    def faulty(self, *args):
        result = blocks(self, *args).copy()
        result[..., -1] += 1e-9
        return result

    monkeypatch.setattr(Libcint, "blocks", faulty)
    records, rulings = settled_fitting(hf, auxmol, "cpu", *TOLERANCES, None, max_quartets_per_class=2)
    assert all(record.passed and record.disputed for record in records), "\n" + format_table(records)
    assert {len(ruling.quartet.shells) for ruling in rulings} == {2, 3}
    assert all(ruling.libcint_error == pytest.approx(1e-9, rel=1e-4) for ruling in rulings)


def test_classes_are_distinct_up_to_permutation(hf, auxmol):
    labels = [class_label(ls) for ls in fitting_classes(*fitting_basis(hf, auxmol).parts)]
    assert labels[:5] == ["(ss|s)", "(ss|p)", "(ss|d)", "(ss|f)", "(ps|s)"]
    assert labels[12:15] == ["(s|s)", "(p|s)", "(p|p)"]
    assert len(set(labels)) == len(labels) == 3 * 4 + 10


def test_samples_stay_within_their_basis(hf, auxmol):
    basis, count = fitting_basis(hf, auxmol), hf.nbas
    ranges = range(count), range(count), range(count, basis.unit)
    (shells,) = samples(basis, (1, 0, 2), 10**6, 0, ranges)
    assert [max(group) < count for group in shells] == [True, True, False]
    assert [len(group) for group in shells] == [2, 5, sum(s.l == 2 for s in basis.shells[count:])]
    assert min(shells[2]) >= count


@pytest.mark.parametrize("cart", [False, True])
def test_libcint_blocks_are_those_of_the_tensors(cart):
    mol, auxmol = every_l(cart, 2)
    basis, libcint = fitting_basis(mol, auxmol), Libcint(mol, 0.0, auxmol)
    ao, first = basis.ao_loc, mol.nbas
    three, two = df.incore.aux_e2(mol, auxmol), auxmol.intor("int2c2e")
    i, j, k = np.array([4, 5]), np.array([1]), first + np.array([2, 0])
    block = libcint.blocks([i[:1], j, k[:1]])
    cut = (slice(*(ao[n : n + 2] - start)) for n, start in ((4, 0), (1, 0), (first + 2, mol.nao)))
    np.testing.assert_allclose(block[0, 0], three[tuple(cut)], atol=1e-14)
    block = libcint.blocks([k[1:], k[:1]])
    cut = (slice(*(ao[n : n + 2] - mol.nao)) for n in (first, first + 2))
    np.testing.assert_allclose(block[0, 0], two[tuple(cut)], atol=1e-14)


def test_schwarz_is_a_bound():
    mol, auxmol = every_l(False, 2)
    libcint, first = Libcint(mol, 0.0, auxmol), mol.nbas
    block = libcint.blocks([np.array([5]), np.array([1]), np.array([first + 2])])
    (pair,), (single,) = libcint.schwarz([[5, 1]]), libcint.schwarz([first + 2])
    assert abs(block).max() <= pair * single * (1 + 1e-12)
    assert single == pytest.approx(np.sqrt(abs(libcint.blocks([[first + 2], [first + 2]])).max()))


def test_refusals(hf, auxmol):
    with pytest.raises(ArgumentError, match="max_quartets_per_class"):
        validate_fitting(hf, auxmol, "cpu", max_quartets_per_class=0)
    with pytest.raises(ArgumentError, match="all spherical or all Cartesian"):
        validate_fitting(hf, next(every_l(True, 1)), "cpu")
    with pytest.raises(UnsupportedError, match="add up to L = 34"):
        validate_fitting(hf, molecule(HYDROGEN_FLUORIDE, {"H": [[17, [1.0, 1.0]]], "F": [[0, [1.0, 1.0]]]}), "cpu")


def test_report(hf, auxmol, monkeypatch):
    """The page has the classes of density fitting, and a failure among them fails the whole."""
    for name in ("oracle_checks", "symmetry_checks", "contraction_checks"):
        monkeypatch.setattr(report, name, lambda *args: [])
    monkeypatch.setattr(report, "OMEGAS", ())
    options = {"backend": "cpu", "max_quartets_per_class": 2, "progress": False, "auxmol": auxmol}
    found = make_report(hf, **options)
    assert found.passed
    assert len(found.fitting) == 22
    shown = {row[0]: row for row in Page(page(found)).rows}
    for record in found.fitting:
        assert int(shown[record.label][1]) == record.quartets
        assert shown[record.label][-1] == "pass"
    found.fitting[3].passed, found.fitting[3].disputed = False, 5
    assert found.failed == ["(ss|f)"]
    assert "FAIL, 5 blocks not arbitrated" in page(found)


@pytest.mark.parametrize("ls", [(2, 1, 3), (3, 2), (1, 0, 8)])
def test_oracle_checks(ls):
    found = checks.oracle_check(checks.OPERATORS[1], ls, "cpu", 2e-11)  # (ps|l): 1.03e-11 on a processor of four lanes
    assert found.passed, found
    assert found.name == f"erf(0.7) {class_label(ls)}"
