"""The report finds faults, lets the oracle arbitrate, and its page says what it holds."""

import re
import shlex
import time

import numpy as np
import pytest
from pages import Page

from md4.__main__ import main
from md4.engine import Engine
from md4.support.environment import versions
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


def test_versions_and_the_command_are_on_the_page(few, tmp_path):
    path = tmp_path / "report.html"
    command = ["validate", *ARGUMENTS, "--report", str(path)]
    assert main(command) == 0
    shown = {row[0]: row[1] for row in Page(path.read_text()).rows[:30]}
    assert shown["command"] == shlex.join(["md4", *command])
    assert {name: shown[name] for name in versions()} == {name: v or "not installed" for name, v in versions().items()}
    assert shown["processor"]
    assert shown["written"].endswith("UTC")


def test_times_are_warm(make, monkeypatch):
    """What only the first call of a class takes, such as compiling, is kept apart."""
    for name in ("contraction_checks", "oracle_checks", "symmetry_checks"):
        monkeypatch.setattr(report, name, lambda *args: [])
    monkeypatch.setattr(report, "OMEGAS", ())
    compute, seen = Engine.compute, set()

    def slow_at_first(self, bra, ket, *args, **options):
        if (key := (np.shape(bra), np.shape(ket), str(bra), str(ket))) not in seen:
            seen.add(key)
            time.sleep(0.2)
        return compute(self, bra, ket, *args, **options)

    monkeypatch.setattr(Engine, "compute", slow_at_first)
    found = make()
    assert max(record.md4_seconds for record in found.records) < 0.2
    assert min(record.first_seconds for record in found.records) > 0.1
    shown = {row[0]: row[1] for row in Page(page(found)).rows if len(row) == 2}
    assert float(shown["of it first calls, which compile / s"]) > 0.1 * len(found.records)


def test_the_page_follows_the_theme(make):
    """No colour is fixed but that of the verdict; plots fit a phone with letters of 13 pixels or nearly so."""
    text = page(make())
    style, body = text.split("</style>")
    assert "color-scheme:light dark" in style
    assert "@media (prefers-color-scheme:dark)" in style
    rules = style[style.index("body{") :]
    assert set(re.findall(r"#\w{3,6}", rules)) == {"#fff", "#1d6f42", "#b3261e", "#8a5a00"}
    assert "#" not in re.sub(r"&#\w+;", "", body)
    assert all(int(width) <= 400 for width in re.findall(r'viewBox="0 0 (\d+) ', body))
    assert "min-width" not in rules


def test_names_and_numbers_of_a_plot_do_not_overlap():
    series = [Series("n" * 30, "blue", [(0, 1e-3, "")]), Series("m" * 20, "red", [(40, 1.0, "")])]
    text = scatter(series, "L", "error", (0, 40))
    legend = re.findall(r'<circle cx="[\d.]+" cy="(\d+)" r="4" class="\w+"/>', text)
    assert len(set(legend)) == 2
    numbers = re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle">\d+<', text)
    assert min(np.diff([float(x) for x in numbers])) > 16


def test_plot():
    points = [(0, 0.0, "zero"), (1, 1e-15, "<low>"), (2, 1e-12, "high")]
    text = scatter([Series("a & b", "blue", points)], "L", "error", (0, 2), (1e-13, "level"), 1e-17)
    Page(text)
    places = [tuple(map(float, p)) for p in re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="4" class="blue"><title>', text)]
    assert len(places) == 3
    assert places[0][0] < places[1][0] < places[2][0]
    assert places[0][1] > places[1][1] > places[2][1]
    assert "&lt;low&gt;" in text
    assert "a &amp; b" in text
