"""The report finds faults, lets the oracle arbitrate, and its page says what it holds."""

import re

import numpy as np
import pytest
from pages import Page

from md4.__main__ import main
from md4.engine import Engine
from md4.validation import arbiter, report
from md4.validation import identities as checks
from md4.validation.libcint import Libcint
from md4.validation.page import page
from md4.validation.report import make_report
from md4.validation.svg import Series, scatter

gto = pytest.importorskip("pyscf.gto")
pytest.importorskip("mpmath")

ARGUMENTS = ["H 0 0 0; F 0 0 0.92", "--basis", "6-31g", "--backend", "cpu", "--max-quartets", "4"]


@pytest.fixture(scope="module")
def mol():
    return gto.M(atom=ARGUMENTS[0], basis="6-31g", verbose=0)


@pytest.fixture
def few(monkeypatch):
    """Few and small checks."""
    monkeypatch.setattr(checks, "HIGH_CLASSES", ((2, 0, 2, 0),))
    monkeypatch.setattr(checks, "SMALL_CLASSES", ((1, 0, 1, 0),))
    monkeypatch.setattr(checks, "SYMMETRY_CLASSES", ((2, 1, 1, 0),))


@pytest.fixture
def make(mol, few):
    """Makes a report on the CPU."""
    return lambda **options: make_report(mol, backend="cpu", max_quartets_per_class=4, progress=False, **options)


def faulty(function, fault):
    """`function` with one wrong integral in each block."""

    def wrong(self, *args, **kwargs):
        result = np.array(function(self, *args, **kwargs))
        result[..., -1] += fault
        return result

    return wrong


def test_a_good_installation_passes(make):
    found = make(title="HF <in> 6-31G")
    assert found.passed
    assert [r.label for r in found.records] == ["(ss|ss)", "(ps|ss)", "(pp|ss)", "(ps|ps)", "(pp|ps)", "(pp|pp)"]
    assert all(check.passed for check in found.checks)
    assert len(found.oracle) == len(checks.OPERATORS) + 1  # one class more for the first
    assert len(found.operators) == 2
    text = page(found)
    assert "<title>PASS: md4 accuracy, HF &lt;in&gt; 6-31G</title>" in text
    assert "<script" not in text
    assert "://" not in text  # nothing from elsewhere


def test_the_page_shows_the_records(make):
    found = make()
    rows = Page(page(found)).rows
    shown = {row[0]: row for row in reversed(rows)}  # the table of classes before that of the worst cases
    for record in found.records:
        row = shown[record.label]
        assert int(row[1]) == record.quartets
        assert float(row[2]) == pytest.approx(record.max_abs, rel=0.1)
        assert float(row[3]) == pytest.approx(record.max_rel, rel=0.1)
        assert row[-1] == "pass"
    for check in found.checks:
        assert float(shown[check.name][3]) == pytest.approx(check.error, rel=0.1)
        assert shown[check.name][-1].startswith("pass")
    assert page(found).count("<circle") >= 3 * len(found.records)


def test_where_libcint_is_off_md4_passes(make, monkeypatch):
    monkeypatch.setattr(Libcint, "blocks", faulty(Libcint.blocks, 1e-9))
    monkeypatch.setattr(report, "contraction_checks", lambda *args: [])
    found = make()
    assert found.passed
    assert all(record.disputed for record in found.records)
    assert all(ruling.who == "md4" for ruling in found.rulings)
    assert all(ruling.libcint_error == pytest.approx(1e-9, rel=1e-4) for ruling in found.rulings)
    assert max(sum(r.label == record.label for r in found.rulings) for record in found.records) == arbiter.MOST_RULINGS
    assert "pass: libcint is off (2 of 4 disputed quartets judged)" in page(found)


def test_where_md4_is_off_it_fails(make, monkeypatch):
    monkeypatch.setattr(Engine, "compute", faulty(Engine.compute, 1e-9))
    found = make()
    assert not found.passed
    assert not any(record.passed for record in found.records)
    assert all(ruling.who == "libcint" for ruling in found.rulings)
    failed = {check.name for check in found.checks if not check.passed}
    assert failed >= {"erf(0.3)", "erfc(0.3)", "segmented, s to d", "permutations (dp|ps)", "rotation (dp|ps)"}
    text = page(found)
    assert "<title>FAIL" in text
    assert "Failed: (ss|ss); " in text
    Page(text)


@pytest.mark.sample("nan")
@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_numbers_that_are_none_fail(make, monkeypatch, fault):
    monkeypatch.setattr(Engine, "compute", faulty(Engine.compute, fault))
    found = make()
    assert not any(record.passed for record in found.records)
    assert not any(check.passed for check in found.checks)
    Page(page(found))


def without_oracle(monkeypatch):
    for module in (arbiter, checks):
        monkeypatch.setattr(module, "load_oracle", lambda: None)


def test_without_mpmath_the_page_says_so(make, monkeypatch):
    without_oracle(monkeypatch)
    found = make()
    assert not found.passed
    assert (found.failed, found.verdict) == ([], "INCOMPLETE")
    assert all(check.passed is None for check in found.oracle)
    text = page(found)
    assert "<title>INCOMPLETE: md4 accuracy" in text
    assert f"{len(checks.OPERATORS) + 1} checks were not made: {arbiter.MISSING}." in text
    assert "not made: mpmath" in text


def test_without_mpmath_a_dispute_stays_open_and_fails(make, monkeypatch):
    without_oracle(monkeypatch)
    monkeypatch.setattr(Libcint, "blocks", faulty(Libcint.blocks, 1e-9))
    found = make()
    assert not found.passed
    assert "4 quartets not arbitrated" in page(found)


def test_costly_elements_are_left_open(mol, monkeypatch):
    monkeypatch.setattr(arbiter, "MOST_COST", 0)
    found = report.validate(mol, "cpu", abs_tolerance=0.0, max_quartets_per_class=1, progress=False)
    ruling = arbiter.rule_on(found[-1], report.Basis.from_mol(mol), report.Operator.coulomb())[0]
    assert ruling.exact is None
    assert not ruling.md4_passes(1.0, 1.0)
    assert "too many primitives" in ruling.who


@pytest.mark.slow
def test_all_checks(backend):
    made = [*checks.oracle_checks(backend, 1e-12), *checks.symmetry_checks(backend, 1e-12)]
    assert all(check.passed for check in made), made


def test_command(few, tmp_path, capsys, monkeypatch):
    path = tmp_path / "report.html"
    assert main(["validate", *ARGUMENTS, "--report", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"PASS, see {path}"
    assert "HF" not in printed
    assert "0 0 0.92 in 6-31g" in path.read_text()
    monkeypatch.setattr(Engine, "compute", faulty(Engine.compute, 1e-9))
    assert main(["validate", *ARGUMENTS, "--report", str(path)]) == 1
    assert "FAIL, see" in capsys.readouterr().out


def test_command_says_what_was_not_checked(few, tmp_path, capsys, monkeypatch):
    without_oracle(monkeypatch)
    path = tmp_path / "report.html"
    assert main(["validate", *ARGUMENTS, "--report", str(path)]) == 1
    printed = capsys.readouterr()
    number = len(checks.OPERATORS) + 1
    assert printed.out.splitlines()[-1] == f"INCOMPLETE, {number} checks not made ({arbiter.MISSING}), see {path}"
    assert printed.err == f"md4: the report will be incomplete, because {arbiter.MISSING}.\n"


@pytest.mark.parametrize(("name", "message"), [("report.pdf", "must end in .html"), ("nowhere/r.html", "no folder")])
def test_what_cannot_be_written_is_refused(name, message, capsys):
    assert main(["validate", *ARGUMENTS, "--report", name]) == 2
    assert message in capsys.readouterr().err


def test_plot():
    points = [(0, 0.0, "zero"), (1, 1e-15, "<low>"), (2, 1e-12, "high")]
    text = scatter([Series("a & b", "#000", points)], "L", "error", (0, 2), (1e-13, "level"), 1e-17)
    Page(text)
    places = [tuple(map(float, p)) for p in re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="4" fill="#000"><title>', text)]
    assert len(places) == 3
    assert places[0][0] < places[1][0] < places[2][0]
    assert places[0][1] > places[1][1] > places[2][1]
    assert "&lt;low&gt;" in text
    assert "a &amp; b" in text
